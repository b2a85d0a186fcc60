/* Kernels for attention that reads a key/value cache where it lies. Plain C; usable from C, ctypes or any runtime.
 *
 * The operators, their tensors and attributes are listed by gr_operators() and described in docs/operators. One
 * function, gr_run(), runs any of them.
 *
 * Rules that hold for every operator
 *  - gr_run() returns 0, or a status code of GrStatus with a message in `error` (cut to `error_size` bytes, always
 *    terminated; `error` may be NULL). The message names the operator, the argument and the values.
 *  - Everything is checked before anything is written: after an error no output has changed.
 *  - An output may share its buffer only with the input its operator writes in place: same address and strides. Then
 *    only the new rows are written. Every other overlap of an output is an error.
 *  - Calls are thread safe; calls that write the same buffer are the caller's to order.
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

/* Kinds of attributes. */
typedef enum GrAttributeKind { GR_ATTRIBUTE_INT = 1, GR_ATTRIBUTE_FLOAT = 2, GR_ATTRIBUTE_TEXT = 3 } GrAttributeKind;

typedef struct GrAttribute {
    const char* name;
    int32_t kind; /* GrAttributeKind: which of the fields below holds the value */
    float number;
    int64_t integer;
    const char* text;
} GrAttribute;

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

/* The operators: a JSON list of objects with
 *   name, since_version, doc,
 *   inputs   [{name, shape, dtypes, variable, optional}]
 *   outputs  [{name, shape, dtypes, variable, optional, like, per_row, in_place}]
 *   attributes [{name, kind, default, doc}]
 * `dtypes` are the element types a tensor may have; tensors that name one `variable` have the same. An output has the
 * shape of input number `like`, with 1 in the last place if `per_row`, and may share that input's buffer if
 * `in_place`. `kind` is "int", "bool" (an integer, 0 or 1), "float" or "string"; a `default` of null means none. */
GR_API const char* gr_operators(void);

/* Runs the operator called `op`. `inputs` and `outputs` are in the order of its declaration, NULL where absent; those
 * left out at the end are absent. Attributes left out have their defaults. */
GR_API int32_t gr_run(const char* op, const GrTensor* const* inputs, size_t input_count, const GrTensor* const* outputs,
                      size_t output_count, const GrAttribute* attributes, size_t attribute_count,
                      const GrThreads* threads, char* error, size_t error_size);

#ifdef __cplusplus
}
#endif

#endif /* GRAPHREWRITE_KERNELS_H */
