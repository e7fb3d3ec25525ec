/* The C interface of the compiled core. Functions that return int32_t return 0 when they went well, 1 when memory ran
 * out and 2 for a mistake of the caller's; saki_error() says more.
 *
 * Formats: 0 float32, 1 bfloat16, 2 int8. Pointers are the caller's and are read during the call only, except where
 * a comment says that they must live on.
 */
#ifndef SAKIYOMI_CORE_H
#define SAKIYOMI_CORE_H

#include <stdint.h>

#if defined(_WIN32)
#define SAKI_API __declspec(dllexport)
#else
#define SAKI_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define SAKI_VERSION 1 /* raised when this interface changes */

typedef struct saki_linear saki_linear;
typedef struct saki_decoder saki_decoder;
typedef struct saki_sequence saki_sequence;

SAKI_API int32_t saki_version(void);
SAKI_API const char *saki_error(void); /* of this thread's last failure */
SAKI_API const char *saki_paths(void); /* instruction paths that this processor runs, fastest first, with commas */

/* A packed linear. gated: the first half of the rows are gates, the other half ups. */
SAKI_API int32_t saki_linear_new(int32_t format, int64_t out_features, int64_t in_features, int32_t gated,
                                 saki_linear **made);
SAKI_API void saki_linear_free(saki_linear *);
SAKI_API int64_t saki_linear_bytes(const saki_linear *);
/* Rows [first, first + rows) from float32 or bfloat16, stride values from row to row; bias from float32. */
SAKI_API int32_t saki_linear_fill(saki_linear *, int64_t first, int64_t rows, const void *values, int32_t format,
                                  int64_t stride);
SAKI_API int32_t saki_linear_fill_bias(saki_linear *, int64_t first, int64_t rows, const float *values);
/* y = linear(norm(x)): x is [rows][in_features], y is [rows][out_stride] with room for out_features rounded up to 32.
 * norm is [in_features], or null for none. gate_up, if given, comes between: y = linear(silu(gate) * up). */
SAKI_API int32_t saki_linear_run(const char *path, const saki_linear *, const saki_linear *gate_up, const float *norm,
                                 float eps, const float *x, int64_t rows, float *y, int64_t out_stride,
                                 int32_t threads);
/* The k largest of each row of y and where they are, largest first, the lowest place first among equals. What is no
 * number counts as largest. */
SAKI_API int32_t saki_top(const float *y, int64_t rows, int64_t size, int64_t stride, int32_t k, float *values,
                          int64_t *places, int32_t threads);

typedef struct {
    int32_t layers, heads, kv_heads, head_dim;
    int64_t hidden;
    int32_t cache_format;
    float eps, attention_scale;
} saki_shape;

typedef struct {
    const float *attention_norm, *query_norm, *key_norm, *mlp_norm; /* null: none */
    const saki_linear *qkv, *output, *gate_up, *down;
    int64_t window;
} saki_layer;

/* embedding: [vocabulary][hidden] in float32 or bfloat16, and must live on; null: the rows of the head. norm and head
 * may be null together: then there are no logits. Linears are shared: they may be freed before the decoder. */
SAKI_API int32_t saki_decoder_new(const char *path, const saki_shape *, const saki_layer *layers, const float *norm,
                                  const saki_linear *head, const void *embedding, int32_t embedding_format,
                                  saki_decoder **made);
SAKI_API void saki_decoder_free(saki_decoder *);

SAKI_API int32_t saki_sequence_new(const saki_decoder *, saki_sequence **made);
SAKI_API void saki_sequence_free(saki_sequence *);
SAKI_API int64_t saki_sequence_capacity(const saki_sequence *); /* in tokens */
SAKI_API int64_t saki_sequence_bytes(const saki_sequence *);
/* Of the slots from length on keep those at these ascending offsets, moved together. */
SAKI_API void saki_sequence_keep(saki_sequence *, int64_t length, const int32_t *rows, int64_t count);

typedef struct {
    saki_sequence *sequence;
    int64_t length, rows;
    const int32_t *parents; /* null: a chain */
    int64_t logit_rows;
} saki_part;

typedef struct {
    const saki_part *parts;
    int64_t part_count;
    const int64_t *tokens;         /* null: inputs */
    const float *inputs;           /* [rows][hidden] */
    const float *attention_inputs; /* [rows][in_features of the first qkv], or null: the norm of the inputs */
    const float *rope;             /* [positions][2][head_dim / 2] */
    float *logits;
    int64_t logits_stride;
    int32_t hidden_count;
    const int32_t *hidden_layers;
    float *const *hidden; /* each [rows][hidden] */
} saki_batch;

/* Appends the rows to the sequences, whose lengths are the caller's to keep. If it fails, nothing was written. */
SAKI_API int32_t saki_forward(const saki_decoder *, const saki_batch *, int32_t threads);

#ifdef __cplusplus
}
#endif
#endif
