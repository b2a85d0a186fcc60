// Errors inside the library are exceptions; `guarded` turns them into a status code at the C boundary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "graphrewrite/kernels.h"

namespace gr {

class InvalidArgument : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

inline std::string to_text(const char* value) {
    return value;
}
inline std::string to_text(const std::string& value) {
    return value;
}
inline std::string to_text(std::int64_t value) {
    return std::to_string(value);
}
inline std::string to_text(std::int32_t value) {
    return std::to_string(value);
}

// Throws "op: part part ..." with the parts joined without separators.
template <typename... Parts> [[noreturn]] void fail(const char* op, const Parts&... parts) {
    std::string message = std::string(op) + ": ";
    ((message += to_text(parts)), ...);
    throw InvalidArgument(message);
}

inline void copy_message(const char* message, char* error, std::size_t error_size) {
    if (error == nullptr || error_size == 0)
        return;
    const std::size_t length = std::strlen(message);
    const std::size_t kept = length < error_size ? length : error_size - 1;
    std::memcpy(error, message, kept);
    error[kept] = '\0';
}

// Runs `body`; no exception leaves.
template <typename Body>
std::int32_t guarded(const char* op, char* error, std::size_t error_size, const Body& body) noexcept {
    try {
        body();
        return GR_OK;
    } catch (const InvalidArgument& failure) {
        copy_message(failure.what(), error, error_size);
        return GR_INVALID_ARGUMENT;
    } catch (const std::bad_alloc&) {
        copy_message(op, error, error_size);
        const std::size_t used = std::strlen(op);
        if (error != nullptr && used < error_size)
            copy_message(": out of memory", error + used, error_size - used);
        return GR_FAIL;
    } catch (const std::exception& failure) {
        copy_message(failure.what(), error, error_size);
        return GR_FAIL;
    } catch (...) {
        copy_message(op, error, error_size);
        return GR_FAIL;
    }
}

} // namespace gr
