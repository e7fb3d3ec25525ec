#include "decoder.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace sakiyomi {

namespace {

constexpr int64_t FEW_ROWS = 16;  // up to here, what works row by row isn't worth sharing

// Rows of a sequence that follow one another, and the keys before them.
struct Path {
    const Sequence *sequence;
    int64_t length;             // tokens that the sequence held before
    int64_t position;           // of the first row
    int64_t first, rows;        // of the plan's places
    std::vector<int64_t> keys;  // slots of the keys from `length` on; empty where they lie in order
    int64_t alike;              // of those, the first ones that the path before this one has too
};

// Rows of a path.
struct Stretch {
    const Path *path;
    int64_t first, rows;  // of the path

    int64_t position() const { return path->position + first; }
    int64_t newest() const { return position() + rows - 1; }
};

// Rows of one sequence that attention takes together, in their places' order. Their keys are the same in the blocks
// before `shared`; in those after, each stretch has its own.
struct Tile {
    std::vector<Stretch> stretches;
    int64_t place, rows;
    int64_t position, newest;  // of the first and the last token among them
    int64_t shared;
    int64_t first_page, pages;

    const Sequence &sequence() const { return *stretches[0].path->sequence; }
};

}  // namespace

// How a batch is cut up. A row's place is where its queries are: paths one after the other.
class Plan {
  public:
    Plan(const Batch &given, const Decoder &decoder, int threads);

    Batch batch;
    int threads;
    int64_t rows = 0;
    std::vector<int64_t> token_slots, positions, places;  // by row
    std::vector<int64_t> row_at;                          // by place
    std::vector<const Part *> part_of;                    // by row
    std::vector<int64_t> wanted;                          // rows with logits
    std::vector<Path> paths;
    std::vector<std::pair<int64_t, std::vector<Tile>>> tiles;  // by attention window
    int64_t most_tiles = 0, most_pages = 0, most_queries = 0;  // most_queries: of a tile, in whole tiles of the kernels
    int64_t most_gathered = 0;                                 // blocks of a page that stretches of a tile gather
    std::shared_ptr<const Decoder::Scratch> scratch;

    // Floats that the result of a tile for a page takes: sums of values, highest scores and sums of weights.
    int64_t partial_size(int64_t padded_dim) const { return most_queries * (padded_dim + 2); }

    const std::vector<Tile> &tiles_for(int64_t window) const {
        return std::find_if(tiles.begin(), tiles.end(), [&](const auto &entry) { return entry.first == window; })
            ->second;
    }

  private:
    void add_paths(const Part &part, int64_t first_row);
    void add_tiles(int64_t window, int64_t rows_per_tile);
};

Plan::Plan(const Batch &given, const Decoder &decoder, int threads) : batch(given), threads(threads) {
    for (const Part &part : batch.parts) rows += part.rows;
    token_slots.resize(static_cast<size_t>(rows));
    positions.resize(static_cast<size_t>(rows));
    places.resize(static_cast<size_t>(rows));
    int64_t first = 0;
    for (const Part &part : batch.parts) {
        add_paths(part, first);
        for (int64_t i = 0; i < part.rows; ++i) {
            part_of.push_back(&part);
            token_slots[static_cast<size_t>(first + i)] = part.length + i;
            if (i >= part.rows - part.logit_rows) wanted.push_back(first + i);
        }
        first += part.rows;
    }
    for (size_t place = 0; place < row_at.size(); ++place)
        places[static_cast<size_t>(row_at[place])] = static_cast<int64_t>(place);
    const int64_t group = decoder.shape.heads / decoder.shape.kv_heads;
    for (const Layer &layer : decoder.layers) add_tiles(layer.window, std::max<int64_t>(1, QUERY_TILE / group));
    for (const auto &[window, of_window] : tiles)
        for (const Tile &tile : of_window)
            most_queries = std::max(most_queries, round_up(tile.rows * group, SPARE_ROWS));
}

void Plan::add_tiles(int64_t window, int64_t rows_per_tile) {
    for (const auto &entry : tiles)
        if (entry.first == window) return;
    std::vector<Tile> added;
    for (const Path &path : paths)
        for (int64_t first = 0, taken = 0; first < path.rows; first += taken) {
            if (added.empty() || &added.back().sequence() != path.sequence || added.back().rows == rows_per_tile)
                added.push_back({{}, path.first + first, 0, path.position + first, 0, 0, 0, 0});
            Tile &tile = added.back();
            taken = std::min(rows_per_tile - tile.rows, path.rows - first);
            tile.stretches.push_back({&path, first, taken});
            tile.rows += taken;
            tile.position = std::min(tile.position, tile.stretches.back().position());
            tile.newest = std::max(tile.newest, tile.stretches.back().newest());
        }
    for (Tile &tile : added) {
        const Path &path = *tile.stretches[0].path;
        const bool one = tile.stretches.size() == 1 && path.keys.empty();
        tile.shared = (one ? tile.newest + BLOCK : path.length) / BLOCK;
        tile.first_page = std::max<int64_t>(0, tile.position - window + 1) / PAGE;
        tile.pages = tile.newest / PAGE - tile.first_page + 1;
        most_pages = std::max(most_pages, tile.pages);
        int64_t gathered = 0;
        for (const Stretch &stretch : tile.stretches)
            if (!stretch.path->keys.empty())
                gathered += std::min<int64_t>(PAGE / BLOCK, stretch.newest() / BLOCK - tile.shared + 1);
        most_gathered = std::max(most_gathered, gathered);
    }
    most_tiles = std::max(most_tiles, static_cast<int64_t>(added.size()));
    tiles.emplace_back(window, std::move(added));
}

void Plan::add_paths(const Part &part, int64_t first_row) {
    std::vector<int64_t> before;
    const auto add = [&](const std::vector<int64_t> &path, int64_t known) {
        const auto parted = std::mismatch(path.begin(), path.end(), before.begin(), before.end());
        Path added{part.sequence,
                   part.length,
                   part.length + known,
                   static_cast<int64_t>(row_at.size()),
                   static_cast<int64_t>(path.size()) - known,
                   {},
                   parted.first - path.begin()};
        for (size_t i = 0; i < path.size(); ++i) {
            if (path[i] != static_cast<int64_t>(i) && added.keys.empty())
                for (const int64_t row : path) added.keys.push_back(part.length + row);
            if (static_cast<int64_t>(i) < known) continue;
            positions[static_cast<size_t>(first_row + path[i])] = part.length + static_cast<int64_t>(i);
            row_at.push_back(first_row + path[i]);
        }
        paths.push_back(std::move(added));
        before = path;
    };
    std::vector<int64_t> path;
    if (!part.parents) {
        path.resize(static_cast<size_t>(part.rows));
        std::iota(path.begin(), path.end(), 0);
        add(path, 0);
        return;
    }
    // A tree is covered by paths from its root to its leaves; each computes the rows that no path before it had.
    std::vector<char> inner(static_cast<size_t>(part.rows)), covered(static_cast<size_t>(part.rows));
    for (int64_t i = 0; i < part.rows; ++i)
        if (part.parents[i] >= 0) inner[static_cast<size_t>(part.parents[i])] = 1;
    for (int64_t leaf = 0; leaf < part.rows; ++leaf) {
        if (inner[static_cast<size_t>(leaf)]) continue;
        path.clear();
        int64_t known = 0;
        for (int64_t row = leaf; row >= 0; row = part.parents[row]) path.push_back(row);
        std::reverse(path.begin(), path.end());
        for (const int64_t row : path) {
            known += covered[static_cast<size_t>(row)];
            covered[static_cast<size_t>(row)] = 1;
        }
        add(path, known);
    }
}

// One thread's walk through a forward.
class Pass {
  public:
    Pass(const Decoder &decoder, const Plan &plan, Team &team)
        : decoder_(decoder),
          shape_(decoder.shape),
          scratch_(*plan.scratch),
          kernels_(decoder.kernels_),
          plan_(plan),
          team_(team) {}

    void run() {
        kernels_.begin();
        const std::vector<Layer> &layers = decoder_.layers;
        rowwise([&](int64_t row) {
            embed(row);
            if (!given_) enter(layers[0], row);
        });
        for (size_t i = 0; i < layers.size(); ++i) {
            const Layer &layer = layers[i];
            const bool given = i == 0 && given_;
            multiply(*layer.qkv, operand(given ? Decoder::INPUT : Decoder::NORMED, *layer.qkv), plan_.rows,
                     Finish::store, scratch_.qkv.floats(), layer.qkv->blocks * BLOCK, {});
            rowwise([&](int64_t row) { rotate(layer, static_cast<int>(i), row); });
            attend(layer, static_cast<int>(i));
            add(*layer.output, Decoder::ATTENDED,
                [&](int64_t row) { norm(layer.mlp_norm, row, Decoder::NORMED, *layer.gate_up, row); });
            gate(layer);
            add(*layer.down, Decoder::GATED, [&](int64_t row) {
                leave(static_cast<int>(i) + 1, row);
                if (i + 1 < layers.size()) enter(layers[i + 1], row);
            });
        }
        logits();
        kernels_.end();
    }

  private:
    Operand operand(Decoder::Use use, const Linear &linear) const {
        return scratch_.operands[use][static_cast<size_t>(kernels_.kind(linear.format))].operand();
    }
    int64_t stride() const { return round_up(shape_.hidden, BLOCK); }
    float *residual(int64_t row) const { return scratch_.residual.floats() + row * stride(); }

    // f(row) for every row.
    template <class F>
    void rowwise(F f) {
        if (plan_.rows <= 2) {
            team_.phase(1, 1, [&](int64_t, int64_t) {
                for (int64_t row = 0; row < plan_.rows; ++row) f(row);
            });
            return;
        }
        team_.phase(plan_.rows, std::max<int64_t>(1, plan_.rows / (4 * team_.threads)),
                    [&](int64_t first, int64_t last) {
                        for (int64_t row = first; row < last; ++row) f(row);
                    });
    }

    void embed(int64_t row) {
        const Batch &batch = plan_.batch;
        float *x = residual(row);
        if (!batch.tokens) {
            std::copy_n(batch.inputs + row * shape_.hidden, shape_.hidden, x);
        } else if (!decoder_.embedding) {
            decoder_.head->row(batch.tokens[row], x);
        } else if (decoder_.embedding_format == Format::f32) {
            std::copy_n(static_cast<const float *>(decoder_.embedding) + batch.tokens[row] * shape_.hidden,
                        shape_.hidden, x);
        } else {
            const auto *from = static_cast<const uint16_t *>(decoder_.embedding) + batch.tokens[row] * shape_.hidden;
            for (int64_t i = 0; i < shape_.hidden; ++i) x[i] = from_bf16(from[i]);
        }
        const Linear &qkv = *decoder_.layers[0].qkv;
        const float *seen = nullptr;  // by attention
        if (batch.both())
            seen = norm_both(row);
        else if (batch.attention_inputs)
            seen = batch.attention_inputs + row * qkv.in_features;
        leave(0, row);
        if (seen) kernels_.norm(seen, nullptr, qkv.in_features, 0, operand(Decoder::INPUT, qkv), row);
    }

    // Put a row's inputs, or their norm, in the place of its token's embedding; return the norms of both.
    const float *norm_both(int64_t row) {
        const int64_t hidden = shape_.hidden;
        Operand to{Kind::f32, scratch_.both.data(), 2 * hidden * 4, nullptr, nullptr, 0};
        float *x = residual(row), *norms = scratch_.both.floats() + row * 2 * hidden;
        const float *inputs = plan_.batch.inputs + row * hidden;
        kernels_.norm(x, decoder_.token_norm.data(), hidden, shape_.eps, to, row);
        to.data += hidden * 4;
        kernels_.norm(inputs, decoder_.input_norm.data(), hidden, shape_.eps, to, row);
        std::copy_n(decoder_.norm_residual ? norms + hidden : inputs, hidden, x);
        return norms;
    }

    void enter(const Layer &layer, int64_t row) { norm(layer.attention_norm, row, Decoder::NORMED, *layer.qkv, row); }

    // Hand out the residual stream after so many layers, if that was asked for.
    void leave(int layers, int64_t row) {
        for (const auto &[after, out] : plan_.batch.hidden)
            if (after == layers) std::copy_n(residual(row), shape_.hidden, out + row * shape_.hidden);
    }

    void norm(const std::vector<float> &weight, int64_t row, Decoder::Use use, const Linear &next, int64_t to) {
        kernels_.norm(residual(row), weight.empty() ? nullptr : weight.data(), shape_.hidden, shape_.eps,
                      operand(use, next), to);
    }

    template <class Last>
    void multiply(const Linear &linear, const Operand &in, int64_t rows, Finish finish, float *out, int64_t out_stride,
                  const Operand &destination, Last last) {
        const LinearCall call{linear.weights(), in, rows, finish, out, out_stride, destination};
        const int64_t grain = std::max<int64_t>(1, linear.blocks / (4 * team_.threads));
        team_.phase(linear.blocks, grain, [&](int64_t first, int64_t end) { kernels_.linear(call, first, end); }, last);
    }
    void multiply(const Linear &linear, const Operand &in, int64_t rows, Finish finish, float *out, int64_t out_stride,
                  const Operand &destination) {
        multiply(linear, in, rows, finish, out, out_stride, destination, [] {});
    }

    // residual += linear(rows in use), then after(row) for every row.
    template <class After>
    void add(const Linear &linear, Decoder::Use use, After after) {
        const bool few = plan_.rows <= FEW_ROWS;
        multiply(linear, operand(use, linear), plan_.rows, Finish::add, scratch_.residual.floats(), stride(), {}, [&] {
            for (int64_t row = 0; few && row < plan_.rows; ++row) after(row);
        });
        if (!few) rowwise(after);
    }

    void rotate(const Layer &layer, int index, int64_t row) {
        const auto at = static_cast<size_t>(row);
        const Part &part = *plan_.part_of[at];
        const CacheShape &cache = part.sequence->shape;
        const int64_t slot = plan_.token_slots[at];
        RotateCall call{};
        call.qkv = scratch_.qkv.floats() + row * layer.qkv->blocks * BLOCK;
        call.rope = plan_.batch.rope + plan_.positions[at] * shape_.head_dim;
        call.query_norm = layer.query_norm.empty() ? nullptr : layer.query_norm.data();
        call.key_norm = layer.key_norm.empty() ? nullptr : layer.key_norm.data();
        call.eps = shape_.eps;
        call.heads = shape_.heads;
        call.kv_heads = shape_.kv_heads;
        call.head_dim = shape_.head_dim;
        call.padded_dim = static_cast<int>(dim_);
        call.format = shape_.cache;
        call.queries = scratch_.queries.data() + plan_.places[at] * group_ * query_bytes();
        call.queries_stride = queries_stride();
        call.keys = part.sequence->block(index, 0, slot / BLOCK);
        call.head_stride = cache.head_bytes();
        call.slot = static_cast<int>(slot % BLOCK);
        kernels_.rotate(call);
    }

    int64_t query_bytes() const { return dim_ * element_size(kernels_.kind(shape_.cache)); }
    int64_t queries_stride() const { return (scratch_.rows * group_ + SPARE_ROWS) * query_bytes(); }
    int64_t shares_bytes() const { return round_up(plan_.most_pages * 4, CACHE_LINE); }

    // Attention of every tile and head, whole or page by page: the same sums either way, and the same as in a chain.
    void attend(const Layer &layer, int index) {
        const std::vector<Tile> &tiles = plan_.tiles_for(layer.window);
        const auto items = static_cast<int64_t>(tiles.size()) * shape_.kv_heads;
        const auto item = [&](int64_t i) {
            return std::pair<const Tile &, int>(tiles[static_cast<size_t>(i / shape_.kv_heads)],
                                                static_cast<int>(i % shape_.kv_heads));
        };
        const bool staged = layer.output->format == Format::int8;
        if (items >= 2 * team_.threads || plan_.most_pages == 1) {
            team_.phase(items, 1, [&](int64_t i, int64_t) {
                const auto [tile, head] = item(i);
                for (int64_t page = 0; page < tile.pages; ++page)
                    attend_page(layer, index, tile, head, page, team_.thread);
                bring_together(layer, tile, head, team_.thread);
            });
        } else {
            team_.phase(items * plan_.most_pages, 1, [&](int64_t i, int64_t) {
                const auto [tile, head] = item(i / plan_.most_pages);
                const int64_t page = i % plan_.most_pages;
                if (page < tile.pages) attend_page(layer, index, tile, head, page, i / plan_.most_pages);
            });
            team_.phase(items, 1, [&](int64_t i, int64_t) {
                const auto [tile, head] = item(i);
                bring_together(layer, tile, head, i);
            });
        }
        if (!staged) return;
        const Operand to = operand(Decoder::ATTENDED, *layer.output);
        const int64_t size = layer.output->in_features;
        rowwise([&](int64_t row) {
            kernels_.norm(scratch_.staged.floats() + row * round_up(size, DEPTH), nullptr, size, 0, to, row);
        });
    }

    float *partial(int64_t slot, int64_t page) const {
        return scratch_.partials.floats() + (slot * plan_.most_pages + page) * plan_.partial_size(dim_);
    }

    void attend_page(const Layer &layer, int index, const Tile &tile, int head, int64_t page, int64_t slot) {
        const Sequence &sequence = tile.sequence();
        constexpr int64_t per_page = PAGE / BLOCK;
        const int64_t oldest = std::max<int64_t>(0, tile.position - layer.window + 1);
        const int64_t first = std::max((tile.first_page + page) * per_page, oldest / BLOCK);
        const int64_t last = (tile.first_page + page + 1) * per_page;
        const int64_t shared = std::min(last, tile.shared), own = std::max(first, shared);
        char *scratch = thread_scratch(team_.thread);
        auto *scores = reinterpret_cast<float *>(scratch);
        char *weights = scratch + int64_t{QUERY_TILE} * PAGE * 4,
             *gathered = weights + int64_t{QUERY_TILE} * PAGE * 4 + shares_bytes();
        const char *blocks[per_page], *own_blocks[QUERY_TILE][per_page];
        for (int64_t b = first; b < shared; ++b) blocks[b - first] = sequence.block(index, head, b);
        Branch branches[QUERY_TILE];
        int branch_count = 0;
        int64_t row = 0;
        for (const Stretch &stretch : tile.stretches) {
            const int64_t end = std::max(own, std::min(last, stretch.newest() / BLOCK + 1));
            const Branch *before = branch_count ? &branches[branch_count - 1] : nullptr;
            const char **found = own_blocks[branch_count];
            for (int64_t b = own; b < end; ++b) {
                if (stretch.path->keys.empty()) {
                    found[b - own] = sequence.block(index, head, b);
                    continue;
                }
                const bool alike = before && b - own < before->block_count;
                gather(stretch, index, head, b, alike ? before->blocks[b - own] : nullptr, gathered);
                found[b - own] = gathered;
                gathered += sequence.shape.block_bytes();
            }
            branches[branch_count++] = {static_cast<int>(row * group_), static_cast<int>(stretch.rows * group_),
                                        stretch.position(), found, static_cast<int>(end - own)};
            row += stretch.rows;
        }
        float *acc = partial(slot, page), *stats = acc + plan_.most_queries * dim_;
        AttendCall call{};
        call.format = shape_.cache;
        call.queries = scratch_.queries.data() + head * queries_stride() + tile.place * group_ * query_bytes();
        call.rows = static_cast<int>(tile.rows * group_);
        call.group = static_cast<int>(group_);
        call.padded_dim = static_cast<int>(dim_);
        call.scale = shape_.attention_scale;
        call.blocks = blocks;
        call.block_count = static_cast<int>(std::max<int64_t>(0, shared - first));
        call.branches = branches;
        call.branch_count = branch_count;
        call.first_key = first * BLOCK;
        call.window = layer.window;
        call.scores = scores;
        call.weights = weights;
        call.acc = acc;
        call.highest = stats;
        call.sum = stats + plan_.most_queries;
        kernels_.attend(call);
    }

    // A block as it would be in a chain, of keys that lie elsewhere. `before`: that block of the stretch before this
    // one in the tile, null for none: it has the same tokens but for those that only one of the paths has.
    void gather(const Stretch &stretch, int index, int head, int64_t block, const char *before, char *to) {
        const Path &path = *stretch.path;
        const Sequence &sequence = *path.sequence;
        int64_t key = std::max(block * BLOCK, path.length);
        if (before && path.length + path.alike > block * BLOCK) {
            std::memcpy(to, before, static_cast<size_t>(sequence.shape.block_bytes()));
            key = std::max(key, path.length + path.alike);
        } else if (block * BLOCK < path.length) {
            std::memcpy(to, sequence.block(index, head, block), static_cast<size_t>(sequence.shape.block_bytes()));
        } else {
            std::memset(to, 0, static_cast<size_t>(sequence.shape.block_bytes()));
        }
        for (; key < (block + 1) * BLOCK && key <= stretch.newest(); ++key) {
            const int64_t from = path.keys[static_cast<size_t>(key - path.length)];
            copy_slot(sequence.shape, sequence.block(index, head, from / BLOCK), static_cast<int>(from % BLOCK), to,
                      static_cast<int>(key % BLOCK));
        }
    }

    char *thread_scratch(int thread) const { return scratch_.threads.data() + thread * scratch_.own_bytes; }

    void bring_together(const Layer &layer, const Tile &tile, int head, int64_t slot) {
        Operand out = operand(Decoder::ATTENDED, *layer.output);
        if (layer.output->format == Format::int8)
            out = {Kind::f32, scratch_.staged.data(), round_up(layer.output->in_features, DEPTH) * 4, nullptr, nullptr,
                   0};
        const int64_t element = element_size(out.kind);
        for (int64_t i = 0; i < tile.rows * group_; ++i) {
            const int64_t row = plan_.row_at[static_cast<size_t>(tile.place + i / group_)];
            MergeCall call{};
            call.pages = static_cast<int>(tile.pages);
            call.head_dim = shape_.head_dim;
            call.acc = partial(slot, 0) + i * dim_;
            call.acc_stride = call.stat_stride = plan_.partial_size(dim_);
            call.highest = partial(slot, 0) + plan_.most_queries * dim_ + i;
            call.sum = call.highest + plan_.most_queries;
            call.shares = reinterpret_cast<float *>(thread_scratch(team_.thread) + int64_t{QUERY_TILE} * PAGE * 8);
            call.scale = shape_.attention_scale;
            call.destination = out;
            call.destination.data =
                out.data + row * out.stride + (head * group_ + i % group_) * shape_.head_dim * element;
            kernels_.merge(call);
        }
    }

    void gate(const Layer &layer) {
        const Operand in = operand(Decoder::NORMED, *layer.gate_up), out = operand(Decoder::GATED, *layer.down);
        if (layer.down->format != Format::int8)
            return multiply(*layer.gate_up, in, plan_.rows, Finish::silu_mul, nullptr, 0, out);
        const int64_t size = layer.down->in_features, bytes = round_up(size, DEPTH) * 4;
        multiply(*layer.gate_up, in, plan_.rows, Finish::silu_mul, nullptr, 0,
                 {Kind::f32, scratch_.staged.data(), bytes, nullptr, nullptr, 0});
        rowwise([&](int64_t row) {
            kernels_.norm(reinterpret_cast<const float *>(scratch_.staged.data() + row * bytes), nullptr, size, 0, out,
                          row);
        });
    }

    void logits() {
        const auto wanted = static_cast<int64_t>(plan_.wanted.size());
        if (!decoder_.head || wanted == 0) return;
        const Operand in = operand(Decoder::NORMED, *decoder_.head);
        team_.phase(wanted, std::max<int64_t>(1, wanted / team_.threads), [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i)
                norm(decoder_.norm, plan_.wanted[static_cast<size_t>(i)], Decoder::NORMED, *decoder_.head, i);
        });
        multiply(*decoder_.head, in, wanted, Finish::store, plan_.batch.logits, plan_.batch.logits_stride, {});
    }

    const Decoder &decoder_;
    const DecoderShape &shape_;
    const Decoder::Scratch &scratch_;
    const Kernels &kernels_;
    const Plan &plan_;
    Team &team_;
    const int64_t group_ = shape_.heads / shape_.kv_heads, dim_ = round_up(shape_.head_dim, BLOCK);
    const bool given_ = plan_.batch.both() || plan_.batch.attention_inputs;  // what the first qkv sees
};

namespace {

void require(bool holds, const char *what) {
    if (!holds) throw std::invalid_argument(what);
}

}  // namespace

void Decoder::check() const {
    const int64_t heads = shape.heads, kv_heads = shape.kv_heads, dim = shape.head_dim;
    require(shape.cache != Format::int8, "keys and values must be float32 or bfloat16");
    require(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, "heads must be a multiple of key heads");
    require(heads / kv_heads <= QUERY_TILE, "there may be 64 heads for a key head at most");
    require(dim > 0 && dim % 2 == 0 && dim <= MAX_HEAD, "head_dim must be even, and 512 at most");
    require(!layers.empty(), "there must be a layer");
    require(!head || (head->in_features == shape.hidden && !head->gated), "the head doesn't take the hidden size");
    const Layer &first = layers[0];
    require(token_norm.empty() == input_norm.empty(), "there must be a norm of tokens and one of inputs, or neither");
    require(embedding_format == Format::f32 || embedding_format == Format::bf16,
            "an embedding must be float32 or bfloat16");
    require(token_norm.empty() || first.qkv->in_features == 2 * shape.hidden,
            "the first qkv must take tokens and inputs side by side");
    for (const Layer &layer : layers) {
        require(layer.window > 0, "a window must have a token at least");
        require(!layer.qkv->gated && !layer.output->gated && layer.gate_up->gated && !layer.down->gated,
                "gate_up must be gated, and nothing else");
        require(layer.qkv->out_features == (heads + 2 * kv_heads) * dim, "qkv must give queries, keys and values");
        require(&layer == &first || layer.qkv->in_features == shape.hidden, "qkv must take the hidden size");
        require(layer.output->in_features == heads * dim, "output must take what the heads give");
        require(layer.gate_up->in_features == shape.hidden, "gate_up must take the hidden size");
        require(2 * layer.down->in_features == layer.gate_up->out_features,
                "down must take half of what gate_up gives");
        require(layer.output->out_features == shape.hidden && layer.down->out_features == shape.hidden,
                "output and down must give the hidden size");
        require(layer.down->in_features == first.down->in_features, "layers must have one intermediate size");
    }
}

void Decoder::forward(const Batch &batch, int threads) const {
    require(batch.tokens || batch.inputs, "there must be tokens or inputs");
    require(!batch.tokens || embedding || head, "tokens need an embedding or a head");
    require(batch.both() != token_norm.empty(),
            "there must be tokens and inputs where there are norms for both, and else one of them");
    require(!batch.both() || !batch.attention_inputs, "attention has its inputs from tokens and inputs");
    require(batch.both() || batch.attention_inputs || layers[0].qkv->in_features == shape.hidden,
            "attention needs inputs of its own width");
    for (const auto &[after, out] : batch.hidden)
        require(after >= 0 && after <= shape.layers, "there is no such layer");
    for (const Part &part : batch.parts) {
        require(part.sequence->shape == cache_shape(), "a sequence is another decoder's");
        for (const Part *other = batch.parts.data(); other != &part; ++other)
            require(other->sequence != part.sequence, "a sequence is there twice");
        require(part.rows > 0 && part.logit_rows >= 0 && part.logit_rows <= part.rows, "a part must have rows");
        for (int64_t i = 0; part.parents && i < part.rows; ++i)
            require(part.parents[i] >= -1 && part.parents[i] < i, "a parent must come before its row");
        part.sequence->reserve(part.length + part.rows);
    }
    const auto plan = std::make_shared<Plan>(batch, *this, threads);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        plan->scratch.swap(scratch_);
    }
    plan->scratch = fitted(plan->scratch, *plan);
    Pool::instance().run(threads, [self = shared_from_this(), plan](Team &team) { Pass(*self, *plan, team).run(); });
    const std::lock_guard<std::mutex> lock(mutex_);
    scratch_ = plan->scratch;
}

std::shared_ptr<const Decoder::Scratch> Decoder::fitted(std::shared_ptr<const Scratch> scratch,
                                                        const Plan &plan) const {
    const int64_t group = shape.heads / shape.kv_heads, dim = cache_shape().padded_dim();
    // Trees differ from round to round: room for some more than this one's.
    const int64_t own_bytes = int64_t{QUERY_TILE} * PAGE * 8 +
                              round_up(plan.most_gathered, PAGE / BLOCK) * cache_shape().block_bytes() +
                              round_up(plan.most_pages * 4, CACHE_LINE);
    // Attention that is cut by pages has fewer tiles and heads than two per thread.
    const int64_t items =
        std::max<int64_t>(plan.threads, std::min<int64_t>(2 * plan.threads, plan.most_tiles * shape.kv_heads));
    const int64_t partials = items * plan.most_pages * plan.partial_size(dim) * 4;
    if (scratch && scratch->rows >= plan.rows && scratch->own_bytes >= own_bytes &&
        scratch->threads.size() >= plan.threads * scratch->own_bytes && scratch->partials.size() >= partials)
        return scratch;

    const auto made = std::make_shared<Scratch>();
    made->rows = std::max({FEW_ROWS, plan.rows, scratch ? scratch->rows : 0});
    made->own_bytes = std::max(own_bytes, scratch ? scratch->own_bytes : 0);
    made->threads = Buffer(std::max(plan.threads * made->own_bytes, scratch ? scratch->threads.size() : 0));
    made->partials = Buffer(std::max(partials * 3 / 2, scratch ? scratch->partials.size() : 0));
    scratch.reset();
    const Layer &layer = layers[0];
    made->residual = Buffer(made->rows * round_up(shape.hidden, BLOCK) * 4);
    made->both = Buffer(token_norm.empty() ? 0 : made->rows * 2 * shape.hidden * 4);
    made->qkv = Buffer(made->rows * layer.qkv->blocks * BLOCK * 4);
    made->staged = Buffer(made->rows * std::max(layer.output->depth, layer.down->depth) * 4);
    made->queries = Buffer(shape.kv_heads * (made->rows * group + SPARE_ROWS) * dim * 4);
    std::array<std::array<bool, 4>, USES> there{};
    const auto make = [&](Use use, const Linear &linear) {
        const Kind kind = kernels_.kind(linear.format);
        const auto index = static_cast<size_t>(kind);
        if (there[use][index]) return;
        there[use][index] = true;
        made->operands[use][index] = OperandBuffer(kind, made->rows, linear.depth);
    };
    make(INPUT, *layer.qkv);
    for (const Layer &each : layers) {
        if (each.qkv->in_features == shape.hidden) make(NORMED, *each.qkv);
        make(NORMED, *each.gate_up);
        make(ATTENDED, *each.output);
        make(GATED, *each.down);
    }
    if (head) make(NORMED, *head);
    return made;
}

}  // namespace sakiyomi
