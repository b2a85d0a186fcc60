#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "error.h"

#if defined(GRAPHREWRITE_HAVE_AVX2)
#if defined(_MSC_VER)
#include <immintrin.h>
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#endif

namespace gr {
namespace {

constexpr const char* kVariable = "GRAPHREWRITE_ISA";

#if defined(GRAPHREWRITE_HAVE_AVX2)

struct CpuId {
    std::uint32_t eax, ebx, ecx, edx;
};

CpuId cpuid(std::uint32_t leaf) {
    CpuId id{};
#if defined(_MSC_VER)
    int words[4];
    __cpuidex(words, static_cast<int>(leaf), 0);
    std::memcpy(&id, words, sizeof id);
#else
    __cpuid_count(leaf, 0, id.eax, id.ebx, id.ecx, id.edx);
#endif
    return id;
}

// The register state the operating system saves (XCR0).
std::uint64_t saved_state() {
#if defined(_MSC_VER)
    return _xgetbv(0);
#else
    std::uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (std::uint64_t{high} << 32) | low;
#endif
}

bool has_avx2() {
    constexpr std::uint32_t kFma = 1u << 12, kOsxsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
    constexpr std::uint32_t kAvx2 = 1u << 5;
    constexpr std::uint64_t kXmmYmm = 6;
    if (cpuid(0).eax < 7)
        return false;
    constexpr std::uint32_t kFirst = kFma | kOsxsave | kAvx | kF16c;
    return (cpuid(1).ecx & kFirst) == kFirst && (cpuid(7).ebx & kAvx2) != 0 && (saved_state() & kXmmYmm) == kXmmYmm;
}

#endif
#if defined(GRAPHREWRITE_HAVE_AVX512)

// Asked after has_avx2.
bool has_avx512() {
    constexpr std::uint32_t kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31;
    constexpr std::uint32_t kParts = kF | kDq | kBw | kVl;
    constexpr std::uint64_t kOpmaskZmm = 0xe0;
    return (cpuid(7).ebx & kParts) == kParts && (saved_state() & kOpmaskZmm) == kOpmaskZmm;
}

#endif

// The kernels that this processor and its operating system can run, best first.
std::vector<const Kernels*> supported_kernels() {
    std::vector<const Kernels*> kernels;
#if defined(GRAPHREWRITE_HAVE_AVX2)
    if (has_avx2()) {
#if defined(GRAPHREWRITE_HAVE_AVX512)
        if (has_avx512())
            kernels.push_back(&kAvx512Kernels);
#endif
        kernels.push_back(&kAvx2Kernels);
    }
#endif
    kernels.push_back(&kScalarKernels);
    return kernels;
}

const Kernels& named_kernels(const char* op, const char* source, const char* name) {
    for (const Kernels* kernels : supported_kernels())
        if (std::strcmp(name, kernels->name) == 0)
            return *kernels;
    for (const char* known : {"avx2", "avx512"})
        if (std::strcmp(name, known) == 0)
            fail(op, source, " \"", name, "\" is not supported by this processor or operating system");
    fail(op, source, " \"", name, "\" is unknown, expected \"scalar\", \"avx2\" or \"avx512\"");
}

const Kernels& default_kernels(const char* op) {
    const char* wanted = std::getenv(kVariable);
    if (wanted != nullptr && *wanted != '\0')
        return named_kernels(op, kVariable, wanted);
    return *supported_kernels().front();
}

std::atomic<const Kernels*> active{nullptr};

} // namespace

const Kernels& active_kernels(const char* op) {
    const Kernels* kernels = active.load(std::memory_order_acquire);
    if (kernels == nullptr) {
        kernels = &default_kernels(op);
        const Kernels* none = nullptr;
        if (!active.compare_exchange_strong(none, kernels))
            kernels = none;
    }
    return *kernels;
}

void select_isa(const char* op, const char* name) {
    active.store(name == nullptr ? &default_kernels(op) : &named_kernels(op, "instruction set", name),
                 std::memory_order_release);
}

} // namespace gr
