/* Kernels for attention that reads a key/value cache where it lies. Plain C; usable from C, ctypes or any runtime.
 *
 * Shape letters: B batch, S new tokens, C cache capacity, Hq query heads, Hkv key/value heads, D head size,
 * kv number of key positions a mask covers.
 *
 * Rules that hold for every function
 *  - Returns 0, or a status code of GrStatus with a message in `error` (cut to `error_size` bytes, always terminated;
 *    `error` may be NULL). The message names the operator, the argument and the values.
 *  - Everything is checked before anything is written: after an error no output has changed.
 *  - A tensor that an operator declares optional may be absent: pass NULL.
 *  - `layout` is "BSNH" ([B, S, H, D], also meant by NULL) or "BNSH" ([B, H, S, D]) and holds for every rank-4 tensor.
 *  - `start_pos` is int64, a scalar (one element) or one position per sequence, [B]; 0 <= start_pos, start_pos + S <=
 * C.
 *  - An output may share its buffer only with the input its operator writes in place: same address and strides. Then
 * only the new rows are written. Every other overlap of an output is an error.
 *  - The functions are thread safe; calls that write the same buffer are the caller's to order.
 */
#ifndef GRAPHREWRITE_KERNELS_H
#define GRAPHREWRITE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#if defined(GRAPHREWRITE_BUILDING_LIBRARY)
#define GR_API __declspec(dllexport)
#else
#define GR_API __declspec(dllimport)
#endif
#else
#define GR_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Element types, numbered as ONNX's TensorProto.DataType. */
typedef enum GrDtype {
    GR_FLOAT = 1,
    GR_UINT8 = 2,
    GR_INT8 = 3,
    GR_INT32 = 6,
    GR_INT64 = 7,
    GR_BOOL = 9,
    GR_FLOAT16 = 10,
    GR_DOUBLE = 11,
    GR_BFLOAT16 = 16
} GrDtype;

/* Status codes, numbered as onnxruntime's OrtErrorCode. */
typedef enum GrStatus { GR_OK = 0, GR_FAIL = 1, GR_INVALID_ARGUMENT = 2 } GrStatus;

typedef struct GrTensor {
    void* data;             /* first element; may be NULL when the tensor has no elements */
    int32_t dtype;          /* GrDtype */
    int32_t rank;           /* number of dimensions */
    const int64_t* shape;   /* [rank] */
    const int64_t* strides; /* [rank], in elements, not negative; NULL: contiguous, last dimension fastest */
} GrTensor;

/* How a call may use threads. NULL in place of a GrThreads, or a count below 2, means the calling thread alone. */
typedef struct GrThreads {
    int32_t count; /* tasks that may run at once */
    /* Runs task(argument, 0) ... task(argument, total - 1), in any order, and returns when all have returned.
     * NULL: the call starts `count` - 1 threads of its own and joins them before it returns. */
    void (*parallel_for)(void* context, void (*task)(void* argument, size_t index), size_t total, void* argument);
    void* context;
} GrThreads;

/* The version of the library, "major.minor.patch". */
GR_API const char* gr_version(void);

/* The instruction set in use, "scalar", "avx2" or "avx512"; NULL when the environment variable GRAPHREWRITE_ISA names
 * one that is unknown or that this processor lacks. Every call fails then, and says so. */
GR_API const char* gr_isa(void);

/* Selects an instruction set for calls that start afterwards. NULL: as at load (GRAPHREWRITE_ISA, else the best one).
 */
GR_API int32_t gr_set_isa(const char* name, char* error, size_t error_size);

/* Writes value rows [start_pos, start_pos + S) of a cache; every other row is the cache's.
 * value T[B,S,H,D], cache T[B,C,H,D] -> new_cache T[B,C,H,D] (in place: cache). T: any GrDtype. */
GR_API int32_t gr_update_cache(const GrTensor* value, const GrTensor* cache, const GrTensor* start_pos,
                               const GrTensor* new_cache, const char* layout, const GrThreads* threads, char* error,
                               size_t error_size);

/* Quantizes value per token and head, and writes codes, scales and zero points of the new rows.
 * value float[B,S,H,D], codes int8[B,C,H,D], scales float[B,C,H,1], zero_points? int8[B,C,H,1] -> the same three, new
 * (in place: each one its own). `scheme`, which gives the numerics of torch's quantized_decomposed operators bit for
 * bit: "asymmetric" (also meant by NULL): choose_qparams_per_token_asymmetric, quantize_per_token; needs zero_points.
 *   "symmetric": choose_qparams_per_token, quantize_per_token; zero_points, when present, are set to 0.
 * A row with NaN, or whose range overflows, gets that scale (NaN or infinity), zero point 0 and torch's codes. */
GR_API int32_t gr_update_quantized_cache(const GrTensor* value, const GrTensor* codes, const GrTensor* scales,
                                         const GrTensor* start_pos, const GrTensor* zero_points,
                                         const GrTensor* new_codes, const GrTensor* new_scales,
                                         const GrTensor* new_zero_points, const char* scheme, const char* layout,
                                         const GrThreads* threads, char* error, size_t error_size);

/* softmax(scale * query key^T + mask) value over a cache of float rows, or of int8 rows read as
 * (code - zero_point) * scale.
 * query float[B,S,Hq,D]; key_cache, value_cache both float or both int8 [B,C,Hkv,D], Hkv divides Hq; key_scales,
 * value_scales float[B,C,Hkv,1] with int8 caches and only then; key_zero_points?, value_zero_points? int8[B,C,Hkv,1];
 * recent_key?, recent_value? float[B,S,Hkv,D], both or neither: exact rows that take the place of the cache's at
 * positions [start_pos, start_pos + S); attn_mask? bool (true: visible) or float (added after scaling), broadcast from
 * [S|1,kv], [Hq|1,S|1,kv] or [B|1,Hq|1,S|1,kv], kv <= C -> output float[B,S,Hq,D].
 * Row i sees key j when j < kv (without a mask: j < start_pos + S), and is_causal is 0 or j <= start_pos + i, and the
 * mask is true or above minus infinity. A row that sees no key yields zeros. What a row does not see never reaches its
 * output, not even NaN. `scale` NULL: 1/sqrt(D). */
GR_API int32_t gr_custom_sdpa(const GrTensor* query, const GrTensor* key_cache, const GrTensor* value_cache,
                              const GrTensor* start_pos, const GrTensor* key_scales, const GrTensor* key_zero_points,
                              const GrTensor* value_scales, const GrTensor* value_zero_points,
                              const GrTensor* recent_key, const GrTensor* recent_value, const GrTensor* attn_mask,
                              const GrTensor* output, int32_t is_causal, const float* scale, const char* layout,
                              const GrThreads* threads, char* error, size_t error_size);

/* gr_update_cache of key and value, then gr_custom_sdpa over the new caches; float.
 * query [B,S,Hq,D], key, value [B,S,Hkv,D], caches [B,C,Hkv,D] -> output [B,S,Hq,D], new_key_cache (in place:
 * key_cache), new_value_cache (in place: value_cache). */
GR_API int32_t gr_sdpa_with_kv_cache(const GrTensor* query, const GrTensor* key, const GrTensor* value,
                                     const GrTensor* key_cache, const GrTensor* value_cache, const GrTensor* start_pos,
                                     const GrTensor* attn_mask, const GrTensor* output, const GrTensor* new_key_cache,
                                     const GrTensor* new_value_cache, int32_t is_causal, const float* scale,
                                     const char* layout, const GrThreads* threads, char* error, size_t error_size);

#ifdef __cplusplus
}
#endif

#endif /* GRAPHREWRITE_KERNELS_H */
