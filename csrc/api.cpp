#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "core.h"
#include "cpu.h"
#include "decoder.h"
#include "trie.h"

using namespace sakiyomi;

struct saki_linear {
    std::shared_ptr<Linear> linear;
};
struct saki_decoder {
    std::shared_ptr<Decoder> decoder;
};
struct saki_sequence {
    Sequence sequence;
};
struct saki_trie {
    Trie trie;
};

namespace {

thread_local std::string last_error;

// Run what may throw; 0 when it went well, 1 when memory ran out, 2 for anything else.
template <class F>
int32_t guarded(F f) {
    try {
        f();
        return 0;
    } catch (const std::bad_alloc &) {
        last_error = "out of memory";
        return 1;
    } catch (const std::exception &error) {
        last_error = error.what();
        return 2;
    }
}

const Kernels &path_named(const char *name) {
    if (const Kernels *found = path(name)) return *found;
    throw std::invalid_argument(std::string("no instruction path ") + name + " on this machine");
}

std::vector<float> copied(const float *values, int64_t size) {
    return values ? std::vector<float>(values, values + size) : std::vector<float>();
}

// What the threads share of a linear, or a gated MLP, that runs on its own.
struct Piece {
    const Kernels &kernels;
    std::shared_ptr<const Linear> linear, gate_up;
    std::vector<float> norm;
    float eps;
    const float *x;
    int64_t rows;
    float *y;
    int64_t out_stride;
    OperandBuffer in, gated;
    Buffer staged;

    void run(Team &team) {
        kernels.begin();
        const Linear &first = gate_up ? *gate_up : *linear;
        team.phase(rows, std::max<int64_t>(1, rows / team.threads), [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row)
                kernels.norm(x + row * first.in_features, norm.empty() ? nullptr : norm.data(), first.in_features, eps,
                             in.operand(), row);
        });
        if (gate_up) {
            const bool integers = linear->format == Format::int8;
            const int64_t stage = round_up(linear->in_features, DEPTH);
            const Operand staging{Kind::f32, staged.data(), stage * 4, nullptr, nullptr, 0};
            multiply(team, *gate_up, in.operand(), Finish::silu_mul, integers ? staging : gated.operand());
            if (integers)
                team.phase(rows, 1, [&](int64_t row, int64_t) {
                    kernels.norm(staged.floats() + row * stage, nullptr, linear->in_features, 0, gated.operand(), row);
                });
        }
        multiply(team, *linear, gate_up ? gated.operand() : in.operand(), Finish::store, {});
        kernels.end();
    }

    void multiply(Team &team, const Linear &which, const Operand &from, Finish finish, const Operand &destination) {
        const LinearCall call{which.weights(), from, rows, finish, y, out_stride, destination};
        team.phase(which.blocks, std::max<int64_t>(1, which.blocks / (4 * team.threads)),
                   [&](int64_t begin, int64_t end) { kernels.linear(call, begin, end); });
    }
};

}  // namespace

int32_t saki_version(void) { return SAKI_VERSION; }

const char *saki_error(void) { return last_error.c_str(); }

const char *saki_paths(void) {
    static const std::string names = [] {
        std::string all;
        for (const Kernels *kernels : paths()) all += (all.empty() ? "" : ",") + std::string(kernels->name);
        return all;
    }();
    return names.c_str();
}

int32_t saki_linear_new(int32_t format, int64_t out_features, int64_t in_features, int32_t gated, saki_linear **made) {
    return guarded([&] {
        if (out_features < 1 || in_features < 1 || (gated && out_features % 2))
            throw std::invalid_argument("a linear must have inputs and outputs, a gated one as many gates as ups");
        *made = new saki_linear{
            std::make_shared<Linear>(static_cast<Format>(format), out_features, in_features, gated != 0)};
    });
}

void saki_linear_free(saki_linear *linear) { delete linear; }

int64_t saki_linear_bytes(const saki_linear *linear) { return linear->linear->bytes(); }

int32_t saki_linear_fill(saki_linear *linear, int64_t first, int64_t rows, const void *values, int32_t format,
                         int64_t stride) {
    return guarded([&] { linear->linear->fill(first, rows, values, static_cast<Format>(format), stride); });
}

int32_t saki_linear_fill_bias(saki_linear *linear, int64_t first, int64_t rows, const float *values) {
    return guarded([&] { linear->linear->fill_bias(first, rows, values); });
}

int32_t saki_linear_run(const char *path, const saki_linear *linear, const saki_linear *gate_up, const float *norm,
                        float eps, const float *x, int64_t rows, float *y, int64_t out_stride, int32_t threads) {
    return guarded([&] {
        const Kernels &kernels = path_named(path);
        const Linear &last = *linear->linear, &first = gate_up ? *gate_up->linear : last;
        if (last.gated || (gate_up && (!first.gated || first.out_features != 2 * last.in_features)))
            throw std::invalid_argument("a gated linear goes before another, of half its size, and nowhere else");
        const auto piece = std::make_shared<Piece>(
            Piece{kernels, linear->linear, gate_up ? gate_up->linear : nullptr, copied(norm, first.in_features), eps, x,
                  rows, y, out_stride, OperandBuffer(kernels.kind(first.format), rows, first.depth),
                  OperandBuffer(kernels.kind(last.format), gate_up ? rows : 0, last.depth),
                  Buffer(gate_up && last.format == Format::int8 ? rows * round_up(last.in_features, DEPTH) * 4 : 0)});
        Pool::instance().run(threads, [piece](Team &team) { piece->run(team); });
    });
}

int32_t saki_top(const char *path, const float *y, int64_t rows, int64_t size, int64_t stride, int32_t k, float *values,
                 int64_t *places, float *log_sums, int32_t threads) {
    return guarded([&] {
        const Kernels &kernels = path_named(path);
        const auto sooner = [](float a, float b) {
            return a > b || (a != a && b == b);
        };  // what is no number comes first
        Pool::instance().run(static_cast<int>(std::min<int64_t>(threads, rows)), [=, &kernels](Team &team) {
            team.phase(rows, 1, [&](int64_t row, int64_t) {
                // A short list, largest first; few values get past its last entry.
                const float *from = y + row * stride;
                float *best = values + row * k;
                int64_t *where = places + row * k;
                int32_t held = 0;
                for (int64_t i = 0; i < size; ++i) {
                    if (held == k && !sooner(from[i], best[k - 1])) continue;
                    int32_t at = held < k ? held++ : k - 1;
                    for (; at > 0 && sooner(from[i], best[at - 1]); --at) {
                        best[at] = best[at - 1];
                        where[at] = where[at - 1];
                    }
                    best[at] = from[i];
                    where[at] = i;
                }
                if (log_sums) log_sums[row] = best[0] + std::log(kernels.sum_exp(from, size, best[0]));
            });
        });
    });
}

int32_t saki_decoder_new(const char *path, const saki_shape *shape, const saki_layer *layers, const float *norm,
                         const saki_linear *head, const void *embedding, int32_t embedding_format,
                         const float *token_norm, const float *input_norm, int32_t norm_residual, saki_decoder **made) {
    return guarded([&] {
        const DecoderShape given{shape->layers,   shape->heads,          shape->kv_heads,
                                 shape->head_dim, shape->hidden,         static_cast<Format>(shape->cache_format),
                                 shape->eps,      shape->attention_scale};
        const auto decoder = std::make_shared<Decoder>(given, path_named(path));
        for (int32_t i = 0; i < shape->layers; ++i) {
            const saki_layer &layer = layers[i];
            decoder->layers.push_back(
                {copied(layer.attention_norm, shape->hidden), copied(layer.query_norm, shape->head_dim),
                 copied(layer.key_norm, shape->head_dim), copied(layer.mlp_norm, shape->hidden), layer.qkv->linear,
                 layer.output->linear, layer.gate_up->linear, layer.down->linear, layer.window});
        }
        decoder->norm = copied(norm, shape->hidden);
        decoder->token_norm = copied(token_norm, shape->hidden);
        decoder->input_norm = copied(input_norm, shape->hidden);
        decoder->norm_residual = norm_residual != 0;
        if (head) decoder->head = head->linear;
        decoder->embedding = embedding;
        decoder->embedding_format = static_cast<Format>(embedding_format);
        decoder->check();
        *made = new saki_decoder{decoder};
    });
}

void saki_decoder_free(saki_decoder *decoder) { delete decoder; }

int32_t saki_sequence_new(const saki_decoder *decoder, saki_sequence **made) {
    return guarded([&] { *made = new saki_sequence{Sequence(decoder->decoder->cache_shape())}; });
}

void saki_sequence_free(saki_sequence *sequence) { delete sequence; }

int64_t saki_sequence_capacity(const saki_sequence *sequence) { return sequence->sequence.capacity(); }

int64_t saki_sequence_bytes(const saki_sequence *sequence) {
    return sequence->sequence.capacity() / PAGE * sequence->sequence.shape.page_bytes();
}

void saki_sequence_keep(saki_sequence *sequence, int64_t length, const int32_t *rows, int64_t count) {
    sequence->sequence.keep(length, rows, count);
}

int32_t saki_forward(const saki_decoder *decoder, const saki_batch *given, int32_t threads) {
    return guarded([&] {
        Batch batch{{},          given->tokens, given->inputs,        given->attention_inputs,
                    given->rope, given->logits, given->logits_stride, {}};
        for (int64_t i = 0; i < given->part_count; ++i) {
            const saki_part &part = given->parts[i];
            batch.parts.push_back({&part.sequence->sequence, part.length, part.rows, part.parents, part.logit_rows});
        }
        for (int32_t i = 0; i < given->hidden_count; ++i)
            batch.hidden.emplace_back(given->hidden_layers[i], given->hidden[i]);
        decoder->decoder->forward(batch, threads);
    });
}

int32_t saki_trie_new(int64_t depth, int64_t max_tokens, saki_trie **made) {
    return guarded([&] { *made = new saki_trie{{depth, max_tokens}}; });
}

void saki_trie_free(saki_trie *trie) { delete trie; }

int64_t saki_trie_size(const saki_trie *trie) { return trie->trie.size(); }

int64_t saki_trie_nodes(const saki_trie *trie) { return trie->trie.nodes(); }

int64_t saki_trie_bytes(const saki_trie *trie) { return trie->trie.bytes(); }

int32_t saki_trie_begin(saki_trie *trie, int32_t kept, int64_t *text) {
    return guarded([&] { *text = trie->trie.begin(kept != 0); });
}

int32_t saki_trie_append(saki_trie *trie, int64_t text, const int32_t *tokens, int64_t count) {
    return guarded([&] { trie->trie.append(text, tokens, count); });
}

int32_t saki_trie_end(saki_trie *trie, int64_t text) {
    return guarded([&] { trie->trie.end(text); });
}

int64_t saki_trie_count(const saki_trie *trie, const int32_t *tokens, int64_t count) {
    return trie->trie.count(tokens, count);
}

int32_t saki_trie_following(const saki_trie *trie, const int32_t *tokens, int64_t count, int64_t most, int32_t *next,
                            int64_t *counts, int64_t *found) {
    return guarded([&] { *found = trie->trie.following(tokens, count, most, next, counts); });
}

int32_t saki_trie_ends(const saki_trie *trie, int64_t text, int64_t *counts, int64_t *found) {
    return guarded([&] { *found = trie->trie.ends(text, counts); });
}

int32_t saki_trie_read(const saki_trie *trie, int64_t room, int32_t *tokens, int64_t *texts, int64_t *found) {
    return guarded([&] { *found = trie->trie.read(room, tokens, texts); });
}

int32_t saki_trie_draft(const saki_trie *local, int64_t local_text, const saki_trie *global, int64_t global_text,
                        const saki_draft *draft, int32_t *tokens, int32_t *parents, double *confidences,
                        int64_t *found) {
    return guarded([&] {
        const DraftOptions options{draft->budget, draft->min_survival, draft->tree != 0, draft->max_tokens};
        const std::vector<DraftToken> drafted =
            Trie::draft(local->trie, local_text, global->trie, global_text, options);
        for (size_t i = 0; i < drafted.size(); ++i) {
            tokens[i] = drafted[i].token;
            parents[i] = drafted[i].parent;
            confidences[i] = drafted[i].confidence;
        }
        *found = static_cast<int64_t>(drafted.size());
    });
}
