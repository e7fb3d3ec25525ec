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

#define SAKI_VERSION 4 /* raised when this interface changes */

typedef struct saki_linear saki_linear;
typedef struct saki_decoder saki_decoder;
typedef struct saki_sequence saki_sequence;
typedef struct saki_trie saki_trie;

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
 * number counts as largest. log_sums, unless null: of each row the log of the sum of e^y; no number if one y is none.
 */
SAKI_API int32_t saki_top(const char *path, const float *y, int64_t rows, int64_t size, int64_t stride, int32_t k,
                          float *values, int64_t *places, float *log_sums, int32_t threads);

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
 * may be null together: then there are no logits. Linears are shared: they may be freed before the decoder.
 * token_norm, input_norm: [hidden] each, or both null; then a batch has both tokens and inputs: the first qkv sees
 * [norm of the token's embedding; norm of the inputs], and the first layer adds to the inputs, or to their norm. */
SAKI_API int32_t saki_decoder_new(const char *path, const saki_shape *, const saki_layer *layers, const float *norm,
                                  const saki_linear *head, const void *embedding, int32_t embedding_format,
                                  const float *token_norm, const float *input_norm, int32_t norm_residual,
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
    const float *inputs;           /* [rows][hidden]; null: tokens */
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

/* A counted suffix trie of texts: how often each run of up to `depth` tokens occurs in them. max_tokens: how many are
 * remembered, the oldest being forgotten first; 0 for all. Calls on one trie from several threads take turns. A text
 * that is kept is never forgotten; it is in neither max_tokens nor size nor read, and its occurrences count as later
 * than all others. */
SAKI_API int32_t saki_trie_new(int64_t depth, int64_t max_tokens, saki_trie **made);
SAKI_API void saki_trie_free(saki_trie *);
SAKI_API int64_t saki_trie_size(const saki_trie *);  /* tokens remembered */
SAKI_API int64_t saki_trie_nodes(const saki_trie *); /* at most two per token */
SAKI_API int64_t saki_trie_bytes(const saki_trie *);
/* A text is open from begin to end; its number is never used again. Texts may grow in turns. If memory runs out in
 * append, everything is forgotten; the trie can be used on, and texts that were open still are. A negative token is a
 * mistake, and then nothing is appended. kept: see saki_trie_new. */
SAKI_API int32_t saki_trie_begin(saki_trie *, int32_t kept, int64_t *text);
SAKI_API int32_t saki_trie_append(saki_trie *, int64_t text, const int32_t *tokens, int64_t count);
SAKI_API int32_t saki_trie_end(saki_trie *, int64_t text);
/* How often a run of tokens occurs: 0 where it is longer than depth. */
SAKI_API int64_t saki_trie_count(const saki_trie *, const int32_t *tokens, int64_t count);
/* What follows a run of tokens: up to `most` tokens and how often each does, the most frequent first, of several the
 * one whose occurrence began last. found: how many there are. */
SAKI_API int32_t saki_trie_following(const saki_trie *, const int32_t *tokens, int64_t count, int64_t most,
                                     int32_t *next, int64_t *counts, int64_t *found);
/* How often the last 1, 2, .. tokens of an open text occur, the end itself included: up to depth - 1 counts. */
SAKI_API int32_t saki_trie_ends(const saki_trie *, int64_t text, int64_t *counts, int64_t *found);
/* The tokens remembered, in the order in which they came, and for each a number that those of its text have in common.
 * found: how many there are; if that is more than room, nothing is written. */
SAKI_API int32_t saki_trie_read(const saki_trie *, int64_t room, int32_t *tokens, int64_t *texts, int64_t *found);

typedef struct {
    int64_t budget;      /* most tokens in a row; max_tokens if that is less */
    double min_survival; /* more than 0, at most 1; a token that is less likely to stand, with all before it, isn't
                            drafted */
    int32_t tree;        /* 0: a chain */
    int64_t max_tokens;  /* room for tokens, parents and confidences */
} saki_draft;

/* What may follow the open text of `local`. The text of `global` must be an end of that text, or empty. */
SAKI_API int32_t saki_trie_draft(const saki_trie *local, int64_t local_text, const saki_trie *global,
                                 int64_t global_text, const saki_draft *, int32_t *tokens, int32_t *parents,
                                 double *confidences, int64_t *found);

#ifdef __cplusplus
}
#endif
#endif
