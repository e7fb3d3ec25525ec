// A few rows times one block of weights, per instruction path.
//
// multiply(): out[row][0..32) = sum over the segments of weights, in order, of row x weights. The order in which a
// row's products are added is the same whatever rows are beside it: one accumulator per row and column, from the
// first step to the last. So it is if a second call goes on (`onto`) with what a first one left in `out`.
#pragma once

#include <math.h>
#include <string.h>

#include "kernels.h"

namespace sakiyomi {
namespace {

// Bytes of weights that are asked for ahead of use: about what memory delivers within its latency.
constexpr int AHEAD = 4096;
constexpr int AHEAD_TILES = 4096;

inline uint32_t bits_at(const char *p) {
    uint32_t bits;
    memcpy(&bits, p, 4);
    return bits;
}
inline float float_at(const char *p) {
    float value;
    memcpy(&value, p, 4);
    return value;
}

#if SAKIYOMI_LEVEL >= SAKIYOMI_AVX512

inline void ahead(const char *p) {
    _mm_prefetch(p + AHEAD, _MM_HINT_T0);
    _mm_prefetch(p + AHEAD + 64, _MM_HINT_T0);
}

// p = (or, after the first group of features, +=) the integers less an offset, scaled.
inline void scale_into(float *p, __m512i sums, int32_t offset, float scale, bool first) {
    __m512 x = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_set1_epi32(offset)));
    __m512 before = first ? _mm512_setzero_ps() : _mm512_loadu_ps(p);
    _mm512_storeu_ps(p, _mm512_fmadd_ps(x, _mm512_set1_ps(scale), before));
}

struct F32 {
    static constexpr Kind KIND = Kind::f32;
    static constexpr int ROWS = 14, COLUMNS = 32, ROW_BYTES = 4;
    using Sum = __m512;
    __m512 w0, w1;
    explicit F32(const char *p) : w0(_mm512_loadu_ps(p)), w1(_mm512_loadu_ps(p + 64)) { ahead(p); }
    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum load(const float *p) { return _mm512_loadu_ps(p); }
    void add_to(Sum *sum, const char *a) const {
        __m512 x = _mm512_set1_ps(float_at(a));
        sum[0] = _mm512_fmadd_ps(w0, x, sum[0]);
        sum[1] = _mm512_fmadd_ps(w1, x, sum[1]);
    }
    static void store(float *p, Sum x) { _mm512_storeu_ps(p, x); }
};

#if SAKIYOMI_LEVEL >= SAKIYOMI_AVX512_BF16
struct BF16 {
    static constexpr Kind KIND = Kind::bf16;
    static constexpr int ROWS = 14, COLUMNS = 32, ROW_BYTES = 4;
    using Sum = __m512;
    __m512bh w0, w1;
    explicit BF16(const char *p)
        : w0(reinterpret_cast<__m512bh>(_mm512_loadu_si512(p))),
          w1(reinterpret_cast<__m512bh>(_mm512_loadu_si512(p + 64))) {
        ahead(p);
    }
    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum load(const float *p) { return _mm512_loadu_ps(p); }
    void add_to(Sum *sum, const char *a) const {
        __m512bh x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(bits_at(a))));
        sum[0] = _mm512_dpbf16_ps(sum[0], w0, x);
        sum[1] = _mm512_dpbf16_ps(sum[1], w1, x);
    }
    static void store(float *p, Sum x) { _mm512_storeu_ps(p, x); }
};

struct INT8 {
    static constexpr Kind KIND = Kind::s8;
    static constexpr int ROWS = 14, COLUMNS = 32, ROW_BYTES = 4;
    using Sum = __m512i;
    __m512i w0, w1;
    explicit INT8(const char *p) : w0(_mm512_loadu_si512(p)), w1(_mm512_loadu_si512(p + 64)) { ahead(p); }
    static Sum zero() { return _mm512_setzero_si512(); }
    void add_to(Sum *sum, const char *a) const {
        __m512i x = _mm512_set1_epi32(static_cast<int>(bits_at(a)));
        sum[0] = _mm512_dpbusd_epi32(sum[0], w0, x);
        sum[1] = _mm512_dpbusd_epi32(sum[1], w1, x);
    }
    static void scale(float *p, Sum x, int32_t offset, float scale, bool first) {
        scale_into(p, x, offset, scale, first);
    }
};
#else
struct BF16 {  // a pair of bf16 is two float32: the upper half, and the lower half moved up
    static constexpr Kind KIND = Kind::f32;
    static constexpr int ROWS = 12, COLUMNS = 32, ROW_BYTES = 8;
    using Sum = __m512;
    __m512 even0, odd0, even1, odd1;
    explicit BF16(const char *p) {
        __m512i w0 = _mm512_loadu_si512(p), w1 = _mm512_loadu_si512(p + 64);
        __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        even0 = _mm512_castsi512_ps(_mm512_slli_epi32(w0, 16));
        odd0 = _mm512_castsi512_ps(_mm512_and_si512(w0, upper));
        even1 = _mm512_castsi512_ps(_mm512_slli_epi32(w1, 16));
        odd1 = _mm512_castsi512_ps(_mm512_and_si512(w1, upper));
        ahead(p);
    }
    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum load(const float *p) { return _mm512_loadu_ps(p); }
    void add_to(Sum *sum, const char *a) const {
        __m512 x = _mm512_set1_ps(float_at(a)), y = _mm512_set1_ps(float_at(a + 4));
        sum[0] = _mm512_fmadd_ps(odd0, y, _mm512_fmadd_ps(even0, x, sum[0]));
        sum[1] = _mm512_fmadd_ps(odd1, y, _mm512_fmadd_ps(even1, x, sum[1]));
    }
    static void store(float *p, Sum x) { _mm512_storeu_ps(p, x); }
};

struct INT8 {  // four bytes of a column are two pairs of int16: bytes 0 and 2, bytes 1 and 3
    static constexpr Kind KIND = Kind::s16;
    static constexpr int ROWS = 12, COLUMNS = 32, ROW_BYTES = 8;
    using Sum = __m512i;
    __m512i even0, odd0, even1, odd1;
    explicit INT8(const char *p) {
        __m512i w0 = _mm512_loadu_si512(p), w1 = _mm512_loadu_si512(p + 64);
        even0 = _mm512_and_si512(w0, _mm512_set1_epi16(0xff));
        odd0 = _mm512_srli_epi16(w0, 8);
        even1 = _mm512_and_si512(w1, _mm512_set1_epi16(0xff));
        odd1 = _mm512_srli_epi16(w1, 8);
        ahead(p);
    }
    static Sum zero() { return _mm512_setzero_si512(); }
    void add_to(Sum *sum, const char *a) const {
        __m512i x = _mm512_set1_epi32(static_cast<int>(bits_at(a)));
        __m512i y = _mm512_set1_epi32(static_cast<int>(bits_at(a + 4)));
        sum[0] = _mm512_add_epi32(sum[0], _mm512_add_epi32(_mm512_madd_epi16(even0, x), _mm512_madd_epi16(odd0, y)));
        sum[1] = _mm512_add_epi32(sum[1], _mm512_add_epi32(_mm512_madd_epi16(even1, x), _mm512_madd_epi16(odd1, y)));
    }
    static void scale(float *p, Sum x, int32_t offset, float scale, bool first) {
        scale_into(p, x, offset, scale, first);
    }
};
#endif

#elif SAKIYOMI_LEVEL == SAKIYOMI_AVX2

inline void ahead(const char *p) { _mm_prefetch(p + AHEAD, _MM_HINT_T0); }
inline __m256i load_bits(const char *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }

struct F32 {
    static constexpr Kind KIND = Kind::f32;
    static constexpr int ROWS = 6, COLUMNS = 16, ROW_BYTES = 4;
    using Sum = __m256;
    __m256 w0, w1;
    explicit F32(const char *p) : w0(_mm256_castsi256_ps(load_bits(p))), w1(_mm256_castsi256_ps(load_bits(p + 32))) {
        ahead(p);
    }
    static Sum zero() { return _mm256_setzero_ps(); }
    static Sum load(const float *p) { return _mm256_loadu_ps(p); }
    void add_to(Sum *sum, const char *a) const {
        __m256 x = _mm256_set1_ps(float_at(a));
        sum[0] = _mm256_fmadd_ps(w0, x, sum[0]);
        sum[1] = _mm256_fmadd_ps(w1, x, sum[1]);
    }
    static void store(float *p, Sum x) { _mm256_storeu_ps(p, x); }
};

struct BF16 {
    static constexpr Kind KIND = Kind::f32;
    static constexpr int ROWS = 4, COLUMNS = 16, ROW_BYTES = 8;
    using Sum = __m256;
    __m256 even0, odd0, even1, odd1;
    explicit BF16(const char *p) {
        __m256i w0 = load_bits(p), w1 = load_bits(p + 32);
        __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
        even0 = _mm256_castsi256_ps(_mm256_slli_epi32(w0, 16));
        odd0 = _mm256_castsi256_ps(_mm256_and_si256(w0, upper));
        even1 = _mm256_castsi256_ps(_mm256_slli_epi32(w1, 16));
        odd1 = _mm256_castsi256_ps(_mm256_and_si256(w1, upper));
        ahead(p);
    }
    static Sum zero() { return _mm256_setzero_ps(); }
    static Sum load(const float *p) { return _mm256_loadu_ps(p); }
    void add_to(Sum *sum, const char *a) const {
        __m256 x = _mm256_set1_ps(float_at(a)), y = _mm256_set1_ps(float_at(a + 4));
        sum[0] = _mm256_fmadd_ps(odd0, y, _mm256_fmadd_ps(even0, x, sum[0]));
        sum[1] = _mm256_fmadd_ps(odd1, y, _mm256_fmadd_ps(even1, x, sum[1]));
    }
    static void store(float *p, Sum x) { _mm256_storeu_ps(p, x); }
};

struct INT8 {
    static constexpr Kind KIND = Kind::s16;
    static constexpr int ROWS = 4, COLUMNS = 16, ROW_BYTES = 8;
    using Sum = __m256i;
    __m256i even0, odd0, even1, odd1;
    explicit INT8(const char *p) {
        __m256i w0 = load_bits(p), w1 = load_bits(p + 32);
        even0 = _mm256_and_si256(w0, _mm256_set1_epi16(0xff));
        odd0 = _mm256_srli_epi16(w0, 8);
        even1 = _mm256_and_si256(w1, _mm256_set1_epi16(0xff));
        odd1 = _mm256_srli_epi16(w1, 8);
        ahead(p);
    }
    static Sum zero() { return _mm256_setzero_si256(); }
    void add_to(Sum *sum, const char *a) const {
        __m256i x = _mm256_set1_epi32(static_cast<int>(bits_at(a)));
        __m256i y = _mm256_set1_epi32(static_cast<int>(bits_at(a + 4)));
        sum[0] = _mm256_add_epi32(sum[0], _mm256_add_epi32(_mm256_madd_epi16(even0, x), _mm256_madd_epi16(odd0, y)));
        sum[1] = _mm256_add_epi32(sum[1], _mm256_add_epi32(_mm256_madd_epi16(even1, x), _mm256_madd_epi16(odd1, y)));
    }
    static void scale(float *p, Sum x, int32_t offset, float scale, bool first) {
        __m256 y = _mm256_cvtepi32_ps(_mm256_sub_epi32(x, _mm256_set1_epi32(offset)));
        __m256 before = first ? _mm256_setzero_ps() : _mm256_loadu_ps(p);
        _mm256_storeu_ps(p, _mm256_fmadd_ps(y, _mm256_set1_ps(scale), before));
    }
};

#else

// Four columns at a time, as most processors have instructions for.
#if defined(__GNUC__)
using Floats __attribute__((vector_size(16))) = float;
using Words __attribute__((vector_size(16))) = uint32_t;
using Ints __attribute__((vector_size(16))) = int32_t;
#else
template <class T>
struct Four {
    T of[4];
    T &operator[](int i) { return of[i]; }
    template <class F>
    static Four each(F f) {
        return {{f(0), f(1), f(2), f(3)}};
    }
    friend Four operator+(Four a, Four b) {
        return each([&](int i) { return a.of[i] + b.of[i]; });
    }
    friend Four operator*(Four a, T b) {
        return each([&](int i) { return a.of[i] * b; });
    }
    friend Four operator&(Four a, T b) {
        return each([&](int i) { return a.of[i] & b; });
    }
    friend Four operator<<(Four a, int b) {
        return each([&](int i) { return a.of[i] << b; });
    }
    friend Four operator>>(Four a, int b) {
        return each([&](int i) { return a.of[i] >> b; });
    }
};
using Floats = Four<float>;
using Words = Four<uint32_t>;
using Ints = Four<int32_t>;
#endif

// Sixteen bytes as four of something.
template <class To>
inline To four_at(const void *p) {
    To x;
    memcpy(&x, p, 16);
    return x;
}
template <class To>
inline To as(Words x) {
    return four_at<To>(&x);
}
inline Floats multiply_add(Floats a, float x, Floats sum) {
#ifdef __FP_FAST_FMAF
    for (int i = 0; i < 4; ++i) sum[i] = __builtin_fmaf(a[i], x, sum[i]);
    return sum;
#else
    return sum + a * x;
#endif
}

struct F32 {
    static constexpr Kind KIND = Kind::f32;
    static constexpr int ROWS = 4, COLUMNS = 8, ROW_BYTES = 4;
    using Sum = Floats;
    Floats w0, w1;
    explicit F32(const char *p) : w0(four_at<Floats>(p)), w1(four_at<Floats>(p + 16)) {}
    static Sum zero() { return Sum{}; }
    static Sum load(const float *p) { return four_at<Sum>(p); }
    void add_to(Sum *sum, const char *a) const {
        const float x = float_at(a);
        sum[0] = multiply_add(w0, x, sum[0]);
        sum[1] = multiply_add(w1, x, sum[1]);
    }
    static void store(float *p, Sum x) { memcpy(p, &x, 16); }
};

struct BF16 {
    static constexpr Kind KIND = Kind::f32;
    static constexpr int ROWS = 4, COLUMNS = 8, ROW_BYTES = 8;
    using Sum = Floats;
    Floats even0, odd0, even1, odd1;
    explicit BF16(const char *p) {
        const Words w0 = four_at<Words>(p), w1 = four_at<Words>(p + 16);
        even0 = as<Floats>(w0 << 16);
        odd0 = as<Floats>(w0 & 0xffff0000u);
        even1 = as<Floats>(w1 << 16);
        odd1 = as<Floats>(w1 & 0xffff0000u);
    }
    static Sum zero() { return Sum{}; }
    static Sum load(const float *p) { return four_at<Sum>(p); }
    void add_to(Sum *sum, const char *a) const {
        const float x = float_at(a), y = float_at(a + 4);
        sum[0] = multiply_add(odd0, y, multiply_add(even0, x, sum[0]));
        sum[1] = multiply_add(odd1, y, multiply_add(even1, x, sum[1]));
    }
    static void store(float *p, Sum x) { memcpy(p, &x, 16); }
};

struct INT8 {
    static constexpr Kind KIND = Kind::s16;
    static constexpr int ROWS = 4, COLUMNS = 4, ROW_BYTES = 8;
    using Sum = Ints;
    Ints w[4];  // bytes 0, 2, 1, 3
    explicit INT8(const char *p) {
        const Words all = four_at<Words>(p);
        w[0] = as<Ints>(all & 255u);
        w[1] = as<Ints>((all >> 16) & 255u);
        w[2] = as<Ints>((all >> 8) & 255u);
        w[3] = as<Ints>(all >> 24);
    }
    static Sum zero() { return Sum{}; }
    void add_to(Sum *sum, const char *a) const {
        int16_t x[4];
        memcpy(x, a, sizeof x);
        sum[0] = sum[0] + (w[0] * int32_t{x[0]} + w[1] * int32_t{x[1]} + (w[2] * int32_t{x[2]} + w[3] * int32_t{x[3]}));
    }
    static void scale(float *p, Sum x, int32_t offset, float scale, bool first) {
        for (int c = 0; c < 4; ++c) p[c] = fma(static_cast<float>(x[c] - offset), scale, first ? 0.0f : p[c]);
    }
};

#endif

template <int N>
struct Constant {
    static constexpr int VALUE = N;
};

// f(Constant<n>) for an n in 1..MOST.
template <int MOST, class F>
inline void with_constant(int n, F f) {
    if (n == MOST) return f(Constant<MOST>());
    if constexpr (MOST > 1) with_constant<MOST - 1>(n, f);
}

// What a call multiplies: rows of `stride` bytes, and segments of weights that follow one another along the depth.
struct Factors {
    const char *rows;
    int64_t stride;
    const char *const *segments;
    int count;
    int64_t steps;  // of a segment
};

// R rows x P times COLUMNS columns from a column on, all sums in registers.
template <class M, int R, int P>
void multiply_tile(const Factors &f, const char *a, int column, float *out, int64_t out_stride, bool onto) {
    constexpr int N = M::COLUMNS * 4 / static_cast<int>(sizeof(typename M::Sum));
    const auto place = [&](int p, int r, int n) {
        return out + r * out_stride + column + p * M::COLUMNS + n * (M::COLUMNS / N);
    };
    typename M::Sum sums[P][R][N];
    for (int p = 0; p < P; ++p)
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) sums[p][r][n] = onto ? M::load(place(p, r, n)) : M::zero();
    for (int s = 0; s < f.count; ++s) {
        const char *w = f.segments[s] + column * 4;
        for (int64_t step = 0; step < f.steps; ++step, w += STEP_BYTES, a += M::ROW_BYTES)
            for (int p = 0; p < P; ++p) {
                const M weights(w + p * M::COLUMNS * 4);
                for (int r = 0; r < R; ++r) weights.add_to(sums[p][r], a + r * f.stride);
            }
    }
    for (int p = 0; p < P; ++p)
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) M::store(place(p, r, n), sums[p][r][n]);
}

// The same of integers: sums of 64 features at a time are exact, then scaled and added up as floats.
template <class M, int R>
void multiply_integers(const Operand &in, int64_t row, const char *w, int64_t offset, float *out) {
    constexpr int N = M::COLUMNS * 4 / static_cast<int>(sizeof(typename M::Sum));
    const char *a = in.data + row * in.stride;
    w += offset;
    for (int64_t group = 0; group < in.groups; ++group) {
        typename M::Sum sums[R][N];
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) sums[r][n] = M::zero();
        for (int step = 0; step < DEPTH / 4; ++step, w += STEP_BYTES, a += M::ROW_BYTES) {
            const M weights(w);
            for (int r = 0; r < R; ++r) weights.add_to(sums[r], a + r * in.stride);
        }
        for (int r = 0; r < R; ++r) {
            const int64_t at = (row + r) * in.groups + group;
            for (int n = 0; n < N; ++n)
                M::scale(out + r * BLOCK + n * (M::COLUMNS / N), sums[r][n], in.sums[at], in.scales[at], group == 0);
        }
    }
}

// f(rows as a constant, first row): `rows` in tiles of up to MOST, as even as possible.
template <int MOST, class F>
inline void in_tiles(int rows, F f) {
    for (int row = 0; row < rows;) {
        const int left = rows - row, tiles = (left + MOST - 1) / MOST, now = (left + tiles - 1) / tiles;
        with_constant<MOST>(now, [&](auto constant) { f(constant, row); });
        row += now;
    }
}

template <class M>
void multiply_with(const Factors &f, int rows, float *out, int64_t out_stride, bool onto) {
    in_tiles<M::ROWS>(rows, [&](auto constant, int row) {
        // A single row leaves registers for all columns at once: more sums on their way, and memory read in order.
        constexpr int R = constant.VALUE, P = R == 1 ? BLOCK / M::COLUMNS : 1;
        for (int column = 0; column < BLOCK; column += P * M::COLUMNS)
            multiply_tile<M, R, P>(f, f.rows + row * f.stride, column, out + row * out_stride, out_stride, onto);
    });
}

#if SAKIYOMI_LEVEL == SAKIYOMI_AMX

// Tiles of up to 16 rows x 64 bytes: sums of the first 16 rows (0, 1) and of the next (2, 3), those rows (4; 5), and
// weights (6, 7). Of more than 16 rows 32 are computed, some of them perhaps in vain.
struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
struct TileConfigs {
    alignas(64) TileConfig of[17];
    constexpr TileConfigs() : of() {
        for (int n = 1; n <= 16; ++n) of[n].rows[0] = of[n].rows[1] = of[n].rows[4] = static_cast<uint8_t>(n);
    }
};
// Not made where it is used: compilers think that only a configuration's first bytes are read.
constexpr TileConfigs TILE_CONFIGS;
inline void configure_tiles(int64_t rows) { _tile_loadconfig(&TILE_CONFIGS.of[rows < 16 ? rows : 16]); }

inline void prefetch_tiles(const char *w) {
    for (int line = 0; line < 16 * STEP_BYTES; line += 64) _mm_prefetch(w + AHEAD_TILES + line, _MM_HINT_T0);
}

inline void multiply_amx(const Factors &f, int rows, float *out, int64_t out_stride, bool onto) {
    const auto stride = static_cast<size_t>(f.stride), out_bytes = static_cast<size_t>(out_stride) * 4;
    for (int row = 0; row < rows; row += 32) {
        const bool both = rows - row > 16;
        const char *upper = f.rows + row * f.stride, *lower = upper + 16 * f.stride;
        float *to = out + row * out_stride;
        if (onto) {
            _tile_loadd(0, to, out_bytes);
            _tile_loadd(1, to + 16, out_bytes);
        } else {
            _tile_zero(0);
            _tile_zero(1);
        }
        if (both && onto) {
            _tile_loadd(2, to + 16 * out_stride, out_bytes);
            _tile_loadd(3, to + 16 * out_stride + 16, out_bytes);
        } else {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int s = 0; s < f.count; ++s) {
            const char *w = f.segments[s];
            for (int64_t step = 0; step < f.steps; step += 16, w += 16 * STEP_BYTES, upper += 64, lower += 64) {
                prefetch_tiles(w);
                _tile_loadd(6, w, STEP_BYTES);
                _tile_loadd(7, w + 64, STEP_BYTES);
                _tile_loadd(4, upper, stride);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                if (!both) continue;
                _tile_loadd(5, lower, stride);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, to, out_bytes);
        _tile_stored(1, to + 16, out_bytes);
        if (!both) continue;
        _tile_stored(2, to + 16 * out_stride, out_bytes);
        _tile_stored(3, to + 16 * out_stride + 16, out_bytes);
    }
}

// Up to 32 rows of integers from `first` on: a tile is as deep as a scale reaches.
inline void multiply_amx_integers(const Operand &in, int64_t first, int rows, const char *w, float *out) {
    alignas(64) int32_t sums[32][BLOCK];
    const auto stride = static_cast<size_t>(in.stride);
    const char *upper = in.data + first * in.stride, *lower = upper + 16 * in.stride;
    const bool both = rows > 16;
    const int lines = (16 * STEP_BYTES / 64 + rows - 1) / rows;  // that each row's turn asks for ahead
    for (int64_t group = 0; group < in.groups; ++group, w += 16 * STEP_BYTES, upper += 64, lower += 64) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_loadd(6, w, STEP_BYTES);
        _tile_loadd(7, w + 64, STEP_BYTES);
        _tile_loadd(4, upper, stride);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        _tile_stored(0, sums[0], BLOCK * 4);
        _tile_stored(1, sums[0] + 16, BLOCK * 4);
        if (both) {
            _tile_zero(2);
            _tile_zero(3);
            _tile_loadd(5, lower, stride);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
            _tile_stored(2, sums[16], BLOCK * 4);
            _tile_stored(3, sums[16] + 16, BLOCK * 4);
        }
        for (int r = 0; r < rows; ++r) {
            for (int i = 0; i < lines; ++i) _mm_prefetch(w + AHEAD_TILES + (r * lines + i) * 64, _MM_HINT_T0);
            const int64_t at = (first + r) * in.groups + group;
            for (int c = 0; c < BLOCK; c += 16)
                scale_into(out + r * BLOCK + c, _mm512_load_si512(sums[r] + c), in.sums[at], in.scales[at], group == 0);
        }
    }
}

#else
inline void configure_tiles(int64_t) {}
#endif

// out: [rows][out_stride], of more than EXACT_ROWS rows [rows rounded up to 32]; `onto` what it holds, or from zero
constexpr int EXACT_ROWS = 16;

inline void multiply(Format format, const Factors &f, int rows, float *out, int64_t out_stride, bool onto) {
    if (format == Format::f32) return multiply_with<F32>(f, rows, out, out_stride, onto);
#if SAKIYOMI_LEVEL == SAKIYOMI_AMX
    multiply_amx(f, rows, out, out_stride, onto);
#else
    multiply_with<BF16>(f, rows, out, out_stride, onto);
#endif
}

// out: [32][32], of up to 32 rows from `first` on and a block of int8 weights, still without the weights' scales
inline void multiply_int8(const Operand &in, int64_t first, int rows, const char *w, float *out) {
#if SAKIYOMI_LEVEL == SAKIYOMI_AMX
    multiply_amx_integers(in, first, rows, w, out);
#else
    in_tiles<INT8::ROWS>(rows, [&](auto constant, int row) {
        for (int column = 0; column < BLOCK; column += INT8::COLUMNS)
            multiply_integers<INT8, constant.VALUE>(in, first + row, w, column * 4, out + row * BLOCK + column);
    });
#endif
}

}  // namespace
}  // namespace sakiyomi
