// One instruction path's functions, on top of its vectors (simd_*.h). Included once per path, after them.
//
// Every function works on each row alone, and adds in an order that depends on the row's own size only.

#include "multiply.h"

#if defined(__x86_64__) || defined(_M_X64)
#define SAKIYOMI_X86 1
#include <immintrin.h>
#endif

namespace sakiyomi {
namespace {

constexpr float LOWEST = -INFINITY;
constexpr float SMALLEST = 1e-36f;  // what is below is zero when it becomes an integer: 127 / x would be infinite

Kind kind(Format format) {
    return format == Format::f32 ? F32::KIND : format == Format::bf16 ? BF16::KIND : INT8::KIND;
}

// Every thread rounds to nearest and takes subnormal numbers for zero, whatever its settings were.
#if defined(SAKIYOMI_X86)
thread_local unsigned callers_settings;

void begin() {
    callers_settings = _mm_getcsr();
    _mm_setcsr(0x1f80 | 0x8040);  // no exceptions, to nearest; results and inputs flushed
}

void end() {
    _mm_setcsr(callers_settings);
#if SAKIYOMI_LEVEL == SAKIYOMI_AMX
    _tile_release();
#endif
}
#elif defined(__aarch64__) && !defined(_MSC_VER)
thread_local uint64_t callers_settings;

void begin() {
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(callers_settings));
    __asm__ __volatile__("msr fpcr, %0" : : "r"(uint64_t{1} << 24));
}

void end() { __asm__ __volatile__("msr fpcr, %0" : : "r"(callers_settings)); }
#else
void begin() {}
void end() {}
#endif

inline void prefetch(const char *data, int64_t size) {
#if defined(SAKIYOMI_X86)
    for (int64_t line = 0; line < size; line += 64) _mm_prefetch(data + line, _MM_HINT_T1);
#else
    (void)data;
    (void)size;
#endif
}

// f(offset, lanes): whole vectors, then what is left.
template <class Whole, class Rest>
inline void each(int64_t size, Whole whole, Rest rest) {
    int64_t i = 0;
    for (; i + W <= size; i += W) whole(i);
    if (i < size) rest(i, static_cast<int>(size - i));
}

inline float sum_of_squares(const float *x, int64_t size) {
    V sums[4] = {set1(0), set1(0), set1(0), set1(0)};
    int64_t i = 0;
    for (; i + 4 * W <= size; i += 4 * W)
        for (int j = 0; j < 4; ++j) {
            V v = load(x + i + j * W);
            sums[j] = fma(v, v, sums[j]);
        }
    for (; i + W <= size; i += W) {
        V v = load(x + i);
        sums[0] = fma(v, v, sums[0]);
    }
    if (i < size) {
        V v = load_n(x + i, static_cast<int>(size - i));
        sums[1] = fma(v, v, sums[1]);
    }
    return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

inline float rms_scale(const float *x, int64_t size, float eps) {
    return 1.0f / sqrtf(sum_of_squares(x, size) / static_cast<float>(size) + eps);
}

// Store one vector of a row to multiply (f32 or bf16) at an element of it.
inline void put(const Operand &out, char *row, int64_t i, V x) {
    if (out.kind == Kind::bf16)
        store_bf16(reinterpret_cast<uint16_t *>(row) + i, x);
    else
        store(reinterpret_cast<float *>(row) + i, x);
}
inline void put_n(const Operand &out, char *row, int64_t i, V x, int n) {
    if (out.kind == Kind::bf16)
        store_bf16_n(reinterpret_cast<uint16_t *>(row) + i, x, n);
    else
        store_n(reinterpret_cast<float *>(row) + i, x, n);
}

// get(offset) and get(offset, lanes) give x. Every 64 features are scaled so that the largest of them is 127.
template <class Get>
void quantise(Get get, int64_t size, const Operand &out, int64_t row) {
    char *to = out.data + row * out.stride;
    for (int64_t group = 0; group < out.groups; ++group) {
        const int64_t first = group * DEPTH, count = size - first < DEPTH ? size - first : DEPTH;
        V largest = set1(0), unfit = set1(0);
        const auto look = [&](V x) {
            largest = max(largest, abs(x));
            unfit = fma(x, set1(0), unfit);  // not a number as soon as one x is none, or infinite
        };
        each(count, [&](int64_t i) { look(get(first + i)); }, [&](int64_t i, int n) { look(get(first + i, n)); });
        const float top = highest(largest);
        const V factor = set1(top > SMALLEST ? 127.0f / top : 0.0f);
        // Where the scale is no number the integers may be anything, but what has no integer must not be converted.
        const auto fitted = [&](V x) { return max(mul(x, factor), set1(-127.0f)); };
        alignas(64) float whole[DEPTH] = {};
        each(
            count, [&](int64_t i) { store(whole + i, fitted(get(first + i))); },
            [&](int64_t i, int n) { store_n(whole + i, fitted(get(first + i, n)), n); });
        const int64_t at = row * out.groups + group;
        out.scales[at] = top / 127.0f + sum(unfit);
        out.sums[at] = 128 * (out.kind == Kind::s8 ? store_s8(reinterpret_cast<int8_t *>(to) + first, whole)
                                                   : store_s16(reinterpret_cast<int16_t *>(to) + first, whole));
    }
}

void norm(const float *x, const float *weight, int64_t size, float eps, const Operand &out, int64_t row) {
    const V scale = set1(weight ? rms_scale(x, size, eps) : 1.0f);
    struct {
        const float *x, *weight;
        V scale;
        V operator()(int64_t i) const { return weight ? mul(mul(load(x + i), scale), load(weight + i)) : load(x + i); }
        V operator()(int64_t i, int n) const {
            return weight ? mul(mul(load_n(x + i, n), scale), load_n(weight + i, n)) : load_n(x + i, n);
        }
    } get{x, weight, scale};
    if (out.kind == Kind::s8 || out.kind == Kind::s16) return quantise(get, size, out, row);
    char *to = out.data + row * out.stride;
    each(size, [&](int64_t i) { put(out, to, i, get(i)); }, [&](int64_t i, int n) { put_n(out, to, i, get(i, n), n); });
}

inline V silu(V x) { return div(x, add(set1(1.0f), exp(sub(set1(0.0f), x)))); }

// What is done with the products of up to 32 rows and one block of weights.
inline void finish(const LinearCall &call, int64_t block, int64_t first, int rows, float *products) {
    const Weights &w = call.weights;
    const int64_t column = block * BLOCK;
    for (int r = 0; r < rows; ++r) {
        float *y = products + r * BLOCK;
        const int64_t row = first + r;
        if (w.format == Format::int8)
            for (int c = 0; c < BLOCK; c += W) store(y + c, mul(load(y + c), load(w.scales + column + c)));
        if (w.bias)
            for (int c = 0; c < BLOCK; c += W) store(y + c, add(load(y + c), load(w.bias + column + c)));
        if (call.finish == Finish::silu_mul) {
            char *to = call.destination.data + row * call.destination.stride;
            for (int c = 0; c < BLOCK / 2; c += W)
                put(call.destination, to, block * (BLOCK / 2) + c, mul(silu(load(y + c)), load(y + BLOCK / 2 + c)));
            continue;
        }
        float *to = call.out + row * call.out_stride + column;
        if (call.finish == Finish::add) {
            for (int c = 0; c < BLOCK; c += W) store(to + c, add(load(to + c), load(y + c)));
        } else {
            for (int c = 0; c < BLOCK; c += W) store(to + c, load(y + c));
        }
    }
}

void linear(const LinearCall &call, int64_t first_block, int64_t last_block) {
    configure_tiles(call.rows);
    const Weights &w = call.weights;
    const int64_t steps = w.depth / elements_per_step(w.format);
    alignas(64) float products[32 * BLOCK];
    for (int64_t block = first_block; block < last_block; ++block) {
        const char *data = w.data + block * steps * STEP_BYTES;
        for (int64_t row = 0; row < call.rows; row += 32) {
            const int rows = static_cast<int>(call.rows - row < 32 ? call.rows - row : 32);
            if (w.format == Format::int8)
                multiply_int8(call.in, row, rows, data, products);
            else
                multiply(w.format, {call.in.data + row * call.in.stride, call.in.stride, &data, 1, steps}, rows,
                         products, BLOCK, false);
            finish(call, block, row, rows, products);
        }
    }
}

// One head: the norm if there is one, then the rotation by the position. out has room for padded_dim.
inline void turn(const RotateCall &call, const float *x, const float *weight, float *out) {
    const int half = call.head_dim / 2;
    const float *cosines = call.rope, *sines = call.rope + half;
    const V scale = set1(weight ? rms_scale(x, call.head_dim, call.eps) : 1.0f);
    auto both = [&](int64_t i, auto read, auto write) {
        V a = read(x + i), b = read(x + half + i), c = read(cosines + i), s = read(sines + i);
        if (weight) {
            a = mul(mul(a, scale), read(weight + i));
            b = mul(mul(b, scale), read(weight + half + i));
        }
        write(out + i, sub(mul(a, c), mul(b, s)));
        write(out + half + i, add(mul(b, c), mul(a, s)));
    };
    each(
        half, [&](int64_t i) { both(i, [](const float *p) { return load(p); }, [](float *p, V v) { store(p, v); }); },
        [&](int64_t i, int n) {
            both(i, [n](const float *p) { return load_n(p, n); }, [n](float *p, V v) { store_n(p, v, n); });
        });
}

inline void to_bf16(const float *x, int size, uint16_t *out) {
    each(
        size, [&](int64_t i) { store_bf16(out + i, load(x + i)); },
        [&](int64_t i, int n) { store_bf16_n(out + i, load_n(x + i, n), n); });
}

// A key that isn't finite speaks for its value too, and the value is stored as zero: a value that isn't finite would
// spoil rows that don't see it, since zero times it isn't zero.
inline void write_key_value(const RotateCall &call, char *block, float *key, float *value) {
    // Rounding up to bf16 makes infinity of what is above its largest number.
    const float rounding = call.format == Format::bf16 ? 1.0f + 1.0f / 128 : 1.0f;
    float unfit = 0;
    for (int i = 0; i < call.head_dim; ++i) unfit += value[i] * rounding * 0.0f;
    if (unfit != 0.0f || unfit != unfit) {
        for (int i = 0; i < call.head_dim; ++i) {
            value[i] = 0.0f;
            key[i] = NAN;
        }
    }
    char *values = block + BLOCK * call.padded_dim * element_size(call.format);
    if (call.format == Format::f32) {
        for (int i = 0; i < call.head_dim; ++i) {
            reinterpret_cast<float *>(block)[key_place(call.slot, i, 1)] = key[i];
            reinterpret_cast<float *>(values)[value_place(call.slot, i, 1)] = value[i];
        }
        return;
    }
    alignas(64) uint16_t halves[MAX_HEAD];
    to_bf16(key, call.padded_dim, halves);
    for (int i = 0; i < call.padded_dim; i += 2)
        memcpy(reinterpret_cast<uint16_t *>(block) + key_place(call.slot, i, 2), halves + i, 4);
    to_bf16(value, call.padded_dim, halves);
    for (int i = 0; i < call.padded_dim; ++i)
        reinterpret_cast<uint16_t *>(values)[value_place(call.slot, i, 2)] = halves[i];
}

void rotate(const RotateCall &call) {
    const int dim = call.head_dim, group = call.heads / call.kv_heads;
    alignas(64) float out[MAX_HEAD], value[MAX_HEAD];
    for (int i = 0; i < call.padded_dim; ++i) out[i] = value[i] = 0;
    const Operand queries{kind(call.format), nullptr, 0, nullptr, nullptr, 0};
    const int head_bytes = call.padded_dim * element_size(queries.kind);
    for (int h = 0; h < call.heads; ++h) {
        turn(call, call.qkv + h * dim, call.query_norm, out);
        char *to = call.queries + (h / group) * call.queries_stride + (h % group) * head_bytes;
        for (int i = 0; i < call.padded_dim; i += W) put(queries, to, i, load(out + i));
    }
    const float *keys = call.qkv + call.heads * dim, *values = keys + call.kv_heads * dim;
    for (int h = 0; h < call.kv_heads; ++h) {
        turn(call, keys + h * dim, call.key_norm, out);
        for (int i = 0; i < dim; ++i) value[i] = values[h * dim + i];
        write_key_value(call, call.keys + h * call.head_stride, out, value);
    }
}

// f(first row, rows) for the rows of every branch with blocks of its own, a few at a time: others' are left alone then.
template <class F>
inline void each_branch(const AttendCall &call, F f) {
    int configured = 0;
    for (int n = 0; n < call.branch_count; ++n) {
        const Branch &branch = call.branches[n];
        for (int row = 0; branch.block_count && row < branch.rows; row += EXACT_ROWS) {
            const int rows = branch.rows - row < EXACT_ROWS ? branch.rows - row : EXACT_ROWS;
            if (rows != configured) configure_tiles(configured = rows);
            f(branch, branch.first + row, rows);
        }
    }
}

void attend(const AttendCall &call) {
    configure_tiles(call.rows);
    const int shared = call.block_count * BLOCK, dim = call.padded_dim, steps = elements_per_step(call.format);
    const Operand weights{kind(call.format), call.weights, PAGE * element_size(kind(call.format)), nullptr, nullptr, 0};
    const int64_t query_stride = dim * element_size(weights.kind);
    const int64_t half_block = int64_t{BLOCK} * dim * element_size(call.format);
    for (int b = 0; b < call.block_count; ++b) {
        prefetch(call.blocks[b] + half_block, half_block);  // the values, to come while the weights are worked out
        multiply(call.format, {call.queries, query_stride, call.blocks + b, 1, dim / steps}, call.rows,
                 call.scores + b * BLOCK, PAGE, false);
    }
    bool branched = false;
    each_branch(call, [&](const Branch &branch, int row, int rows) {
        branched = true;
        for (int b = 0; b < branch.block_count; ++b)
            multiply(call.format, {call.queries + row * query_stride, query_stride, branch.blocks + b, 1, dim / steps},
                     rows, call.scores + row * PAGE + shared + b * BLOCK, PAGE, false);
    });
    for (int i = 0, n = 0; i < call.rows; ++i) {
        while (i == call.branches[n].first + call.branches[n].rows) ++n;
        const Branch &branch = call.branches[n];
        const int keys = shared + branch.block_count * BLOCK;
        float *scores = call.scores + i * PAGE;
        const int64_t newest = branch.position + (i - branch.first) / call.group - call.first_key;
        const int64_t oldest = newest - call.window + 1;
        for (int64_t key = newest + 1 < 0 ? 0 : newest + 1; key < keys; ++key) scores[key] = LOWEST;
        for (int64_t key = 0; key < (oldest < keys ? oldest : keys); ++key) scores[key] = LOWEST;
        V top = set1(LOWEST);
        for (int key = 0; key < keys; key += W) top = max(load(scores + key), top);
        const float most = highest(top), base = most == LOWEST ? 0.0f : most;
        V total = set1(0);
        for (int key = 0; key < keys; key += W) {
            V p = exp(mul(sub(load(scores + key), set1(base)), set1(call.scale)));
            total = add(total, p);
            put(weights, weights.data + i * weights.stride, key, p);
        }
        call.highest[i] = most;
        call.sum[i] = sum(total);
    }
    const char *values[PAGE / BLOCK];
    const auto find_values = [&](const char *const *blocks, int count, int column) {
        for (int b = 0; b < count; ++b) values[b] = blocks[b] + half_block + column * BLOCK * element_size(call.format);
    };
    if (branched) configure_tiles(call.rows);
    for (int column = 0; column < dim; column += BLOCK) {
        find_values(call.blocks, call.block_count, column);
        multiply(call.format, {weights.data, weights.stride, values, call.block_count, BLOCK / steps}, call.rows,
                 call.acc + column, dim, false);
    }
    const char *own_weights = weights.data + shared * element_size(weights.kind);
    each_branch(call, [&](const Branch &branch, int row, int rows) {
        for (int column = 0; column < dim; column += BLOCK) {
            find_values(branch.blocks, branch.block_count, column);
            multiply(call.format,
                     {own_weights + row * weights.stride, weights.stride, values, branch.block_count, BLOCK / steps},
                     rows, call.acc + row * dim + column, dim, true);
        }
    });
}

void merge(const MergeCall &call) {
    float most = LOWEST;
    for (int page = 0; page < call.pages; ++page) {
        const float highest = call.highest[page * call.stat_stride];
        if (highest > most) most = highest;
    }
    // A row sees itself at least, so that `most` is a number unless the row's scores are none. Pages that it doesn't
    // see have a share of zero, and are left out as if they weren't there.
    V total = set1(0);
    for (int page = 0; page < call.pages; ++page) {
        V share = exp(set1((call.highest[page * call.stat_stride] - most) * call.scale));
        store_n(call.shares + page, share, 1);
        if (call.shares[page] != 0.0f) total = fma(share, set1(call.sum[page * call.stat_stride]), total);
    }
    auto value = [&](auto read) {
        V all = set1(0);
        for (int page = 0; page < call.pages; ++page)
            if (call.shares[page] != 0.0f)
                all = fma(set1(call.shares[page]), read(call.acc + page * call.acc_stride), all);
        return div(all, total);
    };
    const Operand &out = call.destination;
    each(
        call.head_dim, [&](int64_t i) { put(out, out.data, i, value([i](const float *p) { return load(p + i); })); },
        [&](int64_t i, int n) {
            put_n(out, out.data, i, value([i, n](const float *p) { return load_n(p + i, n); }), n);
        });
}

float sum_exp(const float *x, int64_t size, float largest) {
    V sums[2] = {set1(0), set1(0)};
    int64_t i = 0;
    for (; i + 2 * W <= size; i += 2 * W)
        for (int j = 0; j < 2; ++j) sums[j] = add(sums[j], exp(sub(load(x + i + j * W), set1(largest))));
    float total = sum(add(sums[0], sums[1]));
    for (; i < size; ++i) total += expf(x[i] - largest);
    return total;
}

constexpr Kernels TABLE = {SAKIYOMI_PATH, kind, begin, end, norm, linear, rotate, attend, merge, sum_exp};

}  // namespace
}  // namespace sakiyomi
