#include "trie.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

namespace sakiyomi {

namespace {

constexpr int64_t MAX_DEPTH = 1024, MAX_TOKENS = INT32_MAX;

// A quarter more room at a time: what is remembered should take about as much memory as it has to.
template <class T>
void make_room(std::vector<T> &values, size_t more) {
    const size_t needed = values.size() + more;
    if (needed > values.capacity()) values.reserve(std::max(needed, values.size() + values.size() / 4 + 8));
}

double confidence_of(double count, double of, uint32_t matched) { return count / of * matched / (matched + 1); }

}  // namespace

Trie::Trie(int64_t depth, int64_t max_tokens) : depth_(static_cast<uint32_t>(depth)), max_tokens_(max_tokens) {
    if (depth < 2 || depth > MAX_DEPTH)
        throw std::invalid_argument("depth " + std::to_string(depth) + ": must be in 2.." + std::to_string(MAX_DEPTH));
    if (max_tokens < 0 || max_tokens > MAX_TOKENS)
        throw std::invalid_argument("max_tokens " + std::to_string(max_tokens) + ": must be in 0.." +
                                    std::to_string(MAX_TOKENS));
    nodes_.emplace_back();
    std::fill(std::begin(spare_blocks_), std::end(spare_blocks_), NONE);
}

// -- texts

int64_t Trie::begin(bool kept) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (spare_text_ == NONE) {
        make_room(texts_, 1);
        texts_.emplace_back();
        spare_text_ = static_cast<uint32_t>(texts_.size() - 1);
    }
    const uint32_t id = spare_text_;
    Text &text = texts_[id];
    text.points.assign(depth_, ROOT);
    spare_text_ = text.next;
    text.open = true;
    text.kept = kept;
    return static_cast<int64_t>(text.uses) << 32 | id;
}

uint32_t Trie::opened(int64_t number) const {
    const auto id = static_cast<uint32_t>(number & UINT32_MAX);
    if (number < 0 || id >= texts_.size() || !texts_[id].open || texts_[id].uses != number >> 32)
        throw std::invalid_argument("no text " + std::to_string(number) + " that is open");
    return id;
}

void Trie::append(int64_t number, const int32_t *tokens, int64_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint32_t id = opened(number);
    for (int64_t i = 0; i < count; ++i)
        if (tokens[i] < 0) throw std::invalid_argument("token " + std::to_string(tokens[i]) + ": must be at least 0");
    if (count > MAX_TOKENS - texts_[id].end || (!max_tokens_ && count > MAX_TOKENS - size_ - kept_))
        throw std::invalid_argument("a trie has room for texts of " + std::to_string(MAX_TOKENS) + " tokens");
    try {
        for (int64_t i = 0; i < count; ++i) {
            add(id, tokens[i]);
            if (max_tokens_ && size_ > max_tokens_) forget();
        }
    } catch (...) {
        clear();
        throw;
    }
}

void Trie::end(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint32_t id = opened(number);
    Text &text = texts_[id];
    text.open = false;
    std::vector<uint32_t>().swap(text.points);
    if (text.first == text.end) release(id);
}

// Let another text have the place of one that has ended and of which nothing is remembered.
void Trie::release(uint32_t id) noexcept {
    Text &text = texts_[id];
    const uint32_t uses = text.uses + 1;
    text = Text();
    text.uses = uses & INT32_MAX;
    text.next = spare_text_;
    spare_text_ = id;
}

// Forget everything, also what is kept, when something failed halfway, as for want of memory. Texts stay open.
void Trie::clear() noexcept {
    nodes_.resize(1);
    nodes_[ROOT] = Node();
    spare_node_ = NONE;
    node_count_ = 0;
    links_.clear();
    std::fill(std::begin(spare_blocks_), std::end(spare_blocks_), NONE);
    std::fill(table_.begin(), table_.end(), 0);
    entries_ = 0;
    runs_.clear();
    size_ = kept_ = 0;
    for (uint32_t id = 0; id < texts_.size(); ++id) {
        Text &text = texts_[id];
        const bool held = text.end > text.first;
        text.tokens.clear();
        text.times.clear();
        text.base = text.first = text.end;
        if (held && !text.open) release(id);
    }
}

// -- appending and forgetting

void Trie::add(uint32_t id, int32_t token) {
    Text &text = texts_[id];
    make_room(text.tokens, 1);
    make_room(text.times, 1);
    if (!text.kept) {
        if (!runs_.empty() && runs_.back().text == id)
            ++runs_.back().count;
        else
            runs_.push_back({id, 1});
    }
    text.tokens.push_back(token);
    text.times.push_back(now_++);
    ++text.end;
    ++(text.kept ? kept_ : size_);
    // The leaves of count 1 that reach to the end of this text have just become longer. The other ends follow.
    const uint32_t from = std::max(text.first, text.end > depth_ ? text.end - depth_ : 0);
    for (uint32_t start = from; start < text.end; ++start) {
        const uint32_t length = text.end - 1 - start;
        uint32_t &point = text.points[start % depth_];
        point = advance(length ? point : ROOT, length, id, start, token);
    }
}

// Go on by a token from the node where an end of a text was, `length` tokens from the root. Returns where it is now.
uint32_t Trie::advance(uint32_t at, uint32_t length, uint32_t id, uint32_t start, int32_t token) {
    if (at != ROOT && nodes_[at].count == 1) return at;
    const uint32_t child = find(at, token);
    if (!child) {
        const uint32_t leaf = make(1, id, start);
        nodes_[leaf].token = token;
        attach(at, leaf);
        return leaf;
    }
    const uint32_t reach = length_of(child);
    if (reach == length + 1) {
        Node &node = nodes_[child];
        node.length = static_cast<uint16_t>(reach);  // a leaf of count 1 doesn't know it
        ++node.count;
        saw(child, id, start);
        sift_up(child);
        settle(at);
        return child;
    }
    const int32_t after = string_of(child)[length + 1];
    if (at != ROOT && nodes_[at].degree == 1 && nodes_[at].count == nodes_[child].count + 1) {
        // Nothing else ends here nor parts here: the node moves along. Its only child is in no table.
        nodes_[at].length = static_cast<uint16_t>(length + 1);
        nodes_[child].token = after;
        return at;
    }
    // A new node in the midst of the child's string, in the child's place.
    const uint32_t middle = make(nodes_[child].count + 1, nodes_[child].text, nodes_[child].position);
    const uint32_t block = take_block(0);
    Node &upper = nodes_[middle], &lower = nodes_[child];
    upper.length = static_cast<uint16_t>(length + 1);
    upper.parent = at;
    upper.token = token;
    upper.place = lower.place;
    upper.children = block;
    upper.degree = 1;
    if (nodes_[at].degree > FEW) table_[slot_with(child)] = middle;
    links_[nodes_[at].children + lower.place] = middle;
    links_[block] = child;
    lower.parent = middle;
    lower.token = after;
    lower.place = 0;
    saw(middle, id, start);
    sift_up(middle);
    return middle;
}

// Forget the oldest token, and with it the occurrences that begin there.
void Trie::forget() {
    Run &run = runs_.front();
    const uint32_t id = run.text;
    if (--run.count == 0) runs_.pop_front();
    Text &text = texts_[id];
    const int32_t *tokens = text.at(text.first);
    const uint32_t length = std::min(depth_, text.end - text.first);
    uint32_t node = ROOT;
    for (uint32_t reached = 0; reached < length;) {
        const uint32_t child = find(node, tokens[reached]);
        reached = length_of(child);
        if (--nodes_[child].count == 0) {
            detach(node, child);
            free(child);
            break;
        }
        sift_down(child);
        node = child;
    }
    settle(node);
    ++text.first;
    --size_;
    if (text.first == text.end && !text.open) {
        release(id);
    } else if (const uint32_t unused = text.first - text.base; unused >= 32 && unused >= text.tokens.size() / 4) {
        text.tokens.erase(text.tokens.begin(), text.tokens.begin() + unused);
        text.times.erase(text.times.begin(), text.times.begin() + unused);
        text.base = text.first;
    }
}

// Where nothing ends any more and nothing parts there needn't be a node.
void Trie::settle(uint32_t node) {
    if (node == ROOT || nodes_[node].degree != 1) return;
    const uint32_t child = links_[nodes_[node].children];
    if (nodes_[child].count == nodes_[node].count) absorb(node, child);
}

// Put a node's only child in its place.
void Trie::absorb(uint32_t node, uint32_t child) {
    Node &upper = nodes_[node], &lower = nodes_[child];
    if (nodes_[upper.parent].degree > FEW) table_[slot_with(node)] = child;
    links_[nodes_[upper.parent].children + upper.place] = child;
    lower.parent = upper.parent;
    lower.token = upper.token;
    lower.place = upper.place;
    free(node);
}

// -- nodes and their children

uint32_t Trie::make(uint32_t count, uint32_t id, uint32_t start) {
    uint32_t made = spare_node_;
    if (made == NONE) {
        if (nodes_.size() >= NONE) throw std::bad_alloc();
        make_room(nodes_, 1);
        made = static_cast<uint32_t>(nodes_.size());
        nodes_.emplace_back();
    } else {
        spare_node_ = nodes_[made].parent;
    }
    Node &node = nodes_[made];
    node = Node();
    node.count = count;
    node.text = id;
    node.position = start;
    ++node_count_;
    return made;
}

void Trie::free(uint32_t node) noexcept {
    if (nodes_[node].degree) give_block(nodes_[node].children, nodes_[node].room);
    nodes_[node].parent = spare_node_;
    spare_node_ = node;
    --node_count_;
}

uint32_t Trie::length_of(uint32_t node) const {
    const Node &at = nodes_[node];
    return at.count == 1 ? std::min(depth_, texts_[at.text].end - at.position) : at.length;
}

// How far a node's string can be followed: one of full depth, on through the text of its last occurrence.
uint32_t Trie::goes_to(uint32_t node) const {
    const uint32_t length = length_of(node);
    return length < depth_ ? length : texts_[nodes_[node].text].end - nodes_[node].position;
}

const int32_t *Trie::string_of(uint32_t node) const { return texts_[nodes_[node].text].at(nodes_[node].position); }

bool Trie::began_later(uint32_t text, uint32_t position, uint32_t than_text, uint32_t than_position) const {
    if (text == than_text) return position > than_position;
    const Text &a = texts_[text], &b = texts_[than_text];
    if (a.kept != b.kept) return a.kept;
    return static_cast<int32_t>(a.times[position - a.base] - b.times[than_position - b.base]) > 0;
}

// Note an occurrence of a node's string.
void Trie::saw(uint32_t node, uint32_t id, uint32_t start) {
    Node &at = nodes_[node];
    if (!began_later(id, start, at.text, at.position)) return;
    at.text = id;
    at.position = start;
}

bool Trie::before(uint32_t a, uint32_t b) const {
    const Node &one = nodes_[a], &other = nodes_[b];
    if (one.count != other.count) return one.count > other.count;
    return began_later(one.text, one.position, other.text, other.position);
}

void Trie::sift_up(uint32_t node) {
    uint32_t *heap = links_.data() + nodes_[nodes_[node].parent].children;
    uint32_t place = nodes_[node].place;
    for (; place > 0; place = (place - 1) / 2) {
        const uint32_t above = heap[(place - 1) / 2];
        if (!before(node, above)) break;
        heap[place] = above;
        nodes_[above].place = place;
    }
    heap[place] = node;
    nodes_[node].place = place;
}

void Trie::sift_down(uint32_t node) {
    const Node &parent = nodes_[nodes_[node].parent];
    uint32_t *heap = links_.data() + parent.children;
    uint32_t place = nodes_[node].place;
    for (uint32_t below; (below = 2 * place + 1) < parent.degree; place = below) {
        if (below + 1 < parent.degree && before(heap[below + 1], heap[below])) ++below;
        if (!before(heap[below], node)) break;
        heap[place] = heap[below];
        nodes_[heap[place]].place = place;
    }
    heap[place] = node;
    nodes_[node].place = place;
}

uint32_t Trie::find(uint32_t node, int32_t token) const {
    const Node &at = nodes_[node];
    if (at.degree > FEW) return table_[slot_of(node, token)];
    for (uint32_t i = 0; i < at.degree; ++i)
        if (nodes_[links_[at.children + i]].token == token) return links_[at.children + i];
    return 0;
}

void Trie::attach(uint32_t node, uint32_t child) {
    const uint32_t degree = nodes_[node].degree;
    if (degree == 0) {
        nodes_[node].children = take_block(0);
        nodes_[node].room = 0;
    } else if (degree == uint32_t{1} << nodes_[node].room) {
        resize_block(node, static_cast<uint16_t>(nodes_[node].room + 1));
    }
    links_[nodes_[node].children + degree] = child;
    nodes_[node].degree = degree + 1;
    nodes_[child].parent = node;
    nodes_[child].place = degree;
    if (degree == FEW)
        for (uint32_t i = 0; i < degree; ++i) enter(links_[nodes_[node].children + i]);
    if (degree >= FEW) enter(child);
    sift_up(child);
}

void Trie::detach(uint32_t node, uint32_t child) {
    const uint32_t degree = nodes_[node].degree - 1, place = nodes_[child].place;
    if (degree >= FEW) remove(child);
    const uint32_t last = links_[nodes_[node].children + degree];
    nodes_[node].degree = degree;
    if (degree == FEW)
        for (uint32_t i = 0; i <= degree; ++i)
            if (const uint32_t other = links_[nodes_[node].children + i]; other != child) remove(other);
    if (last != child) {
        links_[nodes_[node].children + place] = last;
        nodes_[last].place = place;
        sift_up(last);  // not down: the child's only occurrence was the oldest of all, so nothing was below it
    }
    if (degree == 0)
        give_block(nodes_[node].children, nodes_[node].room);
    else if (degree <= (uint32_t{1} << nodes_[node].room) / 4)
        resize_block(node, static_cast<uint16_t>(nodes_[node].room - 1));
}

void Trie::resize_block(uint32_t node, uint16_t room) {
    const uint32_t block = take_block(room);
    Node &at = nodes_[node];
    std::copy_n(links_.begin() + at.children, at.degree, links_.begin() + block);
    give_block(at.children, at.room);
    at.children = block;
    at.room = room;
}

uint32_t Trie::take_block(uint16_t room) {
    uint32_t &spare = spare_blocks_[room];
    if (spare != NONE) {
        const uint32_t block = spare;
        spare = links_[block];
        return block;
    }
    const size_t size = size_t{1} << room, block = links_.size();
    if (block + size >= NONE) throw std::bad_alloc();
    make_room(links_, size);
    links_.resize(block + size);
    return static_cast<uint32_t>(block);
}

void Trie::give_block(uint32_t block, uint16_t room) noexcept {
    links_[block] = spare_blocks_[room];
    spare_blocks_[room] = block;
}

// -- the table of children of nodes that have more than a few

// Where a child is, or the empty place where it would be.
size_t Trie::slot_of(uint32_t parent, int32_t token) const {
    uint64_t hash = (uint64_t{parent} << 32 | static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15u;
    hash = (hash ^ hash >> 32) * 0xD6E8FEB86659FD93u;
    size_t slot = static_cast<size_t>((hash >> 32) * table_.size() >> 32);
    for (; table_[slot]; slot = slot + 1 == table_.size() ? 0 : slot + 1)
        if (const Node &node = nodes_[table_[slot]]; node.parent == parent && node.token == token) break;
    return slot;
}

size_t Trie::slot_with(uint32_t node) const { return slot_of(nodes_[node].parent, nodes_[node].token); }

void Trie::enter(uint32_t node) {
    if ((entries_ + 1) * 3 > table_.size() * 2) {
        std::vector<uint32_t> old(table_.size() + table_.size() / 2 + 64);
        old.swap(table_);
        for (const uint32_t other : old)
            if (other) table_[slot_with(other)] = other;
    }
    table_[slot_with(node)] = node;
    ++entries_;
}

void Trie::remove(uint32_t node) {
    size_t slot = slot_with(node);
    table_[slot] = 0;
    --entries_;
    // Those behind it up to the next gap may have been displaced by it.
    for (;;) {
        slot = slot + 1 == table_.size() ? 0 : slot + 1;
        const uint32_t other = table_[slot];
        if (!other) return;
        table_[slot] = 0;
        table_[slot_with(other)] = other;
    }
}

// -- what is known

int64_t Trie::size() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return size_;
}

int64_t Trie::nodes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return node_count_;
}

int64_t Trie::bytes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    size_t all = sizeof(*this) + nodes_.capacity() * sizeof(Node) + runs_.size() * sizeof(Run) +
                 (links_.capacity() + table_.capacity()) * 4 + texts_.capacity() * sizeof(Text);
    for (const Text &text : texts_)
        all += (text.tokens.capacity() + text.times.capacity() + text.points.capacity()) * 4;
    return static_cast<int64_t>(all);
}

bool Trie::locate(const int32_t *tokens, int64_t count, Point &point) const {
    if (count > depth_) return false;
    const auto size = static_cast<uint32_t>(count);
    uint32_t node = ROOT;
    for (uint32_t length = 0; length < size;) {
        node = find(node, tokens[length]);
        if (!node) return false;
        const uint32_t reach = std::min(length_of(node), size);
        const int32_t *string = string_of(node);
        while (++length < reach)
            if (string[length] != tokens[length]) return false;
    }
    point = {node, size};
    return true;
}

int64_t Trie::count(const int32_t *tokens, int64_t count) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    Point point;
    if (count == 0) return size_ + kept_;
    return locate(tokens, count, point) ? nodes_[point.node].count : 0;
}

int64_t Trie::following(const int32_t *tokens, int64_t count, int64_t most, int32_t *next, int64_t *counts) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    Point point;
    if (most < 1 || !locate(tokens, count, point)) return 0;
    const Node &node = nodes_[point.node];
    if (point.node != ROOT && point.length < length_of(point.node)) {
        next[0] = string_of(point.node)[point.length];
        counts[0] = node.count;
        return 1;
    }
    std::vector<uint32_t> places;  // those whose turn may be next: under each that had its turn there are two
    if (node.degree) places.push_back(0);
    const uint32_t *heap = links_.data() + node.children;
    int64_t found = 0;
    while (found < most && !places.empty()) {
        const auto best = std::min_element(places.begin(), places.end(),
                                           [&](uint32_t a, uint32_t b) { return before(heap[a], heap[b]); });
        const uint32_t place = *best;
        places.erase(best);
        next[found] = nodes_[heap[place]].token;
        counts[found++] = nodes_[heap[place]].count;
        for (uint32_t below = 2 * place + 1; below <= 2 * place + 2 && below < node.degree; ++below)
            places.push_back(below);
    }
    return found;
}

uint32_t Trie::known_ends(const Text &text) const { return std::min(depth_ - 1, text.end - text.first); }

int64_t Trie::ends(int64_t number, int64_t *counts) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Text &text = texts_[opened(number)];
    const uint32_t known = known_ends(text);
    for (uint32_t length = 1; length <= known; ++length)
        counts[length - 1] = nodes_[text.points[(text.end - length) % depth_]].count;
    return known;
}

int64_t Trie::read(int64_t room, int32_t *tokens, int64_t *texts) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (size_ > room) return size_;
    std::vector<uint32_t> positions;
    for (const Text &text : texts_) positions.push_back(text.first);
    for (const Run &run : runs_) {
        const Text &text = texts_[run.text];
        tokens = std::copy_n(text.at(positions[run.text]), run.count, tokens);
        texts = std::fill_n(texts, run.count, run.text);
        positions[run.text] += run.count;
    }
    return size_;
}

// -- drafting

std::vector<DraftToken> Trie::draft(const Trie &local, int64_t local_text, const Trie &global, int64_t global_text,
                                    const DraftOptions &given) {
    if (&local == &global) throw std::invalid_argument("a draft needs two tries");
    if (!(given.min_survival > 0 && given.min_survival <= 1))
        throw std::invalid_argument("min_survival " + std::to_string(given.min_survival) +
                                    ": must be more than 0, at most 1");
    DraftOptions options = given;
    options.budget = std::min(given.budget, given.max_tokens);
    const std::scoped_lock lock(local.mutex_, global.mutex_);
    const Text &text = local.texts_[local.opened(local_text)], &shared = global.texts_[global.opened(global_text)];
    const uint32_t local_ends = local.known_ends(text), shared_ends = global.known_ends(shared);

    // Ends of the text that the shared one doesn't reach back to, found in what others wrote. Where one didn't occur,
    // no longer one did.
    std::vector<uint32_t> before_shared;
    for (uint32_t length = shared_ends + 1; length < global.depth_ && length <= text.end - text.first; ++length) {
        Point point;
        if (!global.locate(text.at(text.end - length), length, point)) break;
        before_shared.push_back(point.node);
    }

    Match best;
    const auto consider = [&](const Trie &trie, uint32_t node, uint32_t length, double unseen) {
        Match match{&trie, {node, length}, &trie == &local, unseen, 0};
        match.score = trie.score(match, options);
        if (match.score > best.score) best = match;
    };
    for (uint32_t length = std::max(local.depth_, global.depth_) - 1; length > 0; --length) {
        if (length <= local_ends) consider(local, text.points[(text.end - length) % local.depth_], length, 0);
        if (length <= shared_ends)
            consider(global, shared.points[(shared.end - length) % global.depth_], length, 0);
        else if (length - shared_ends <= before_shared.size())
            consider(global, before_shared[length - shared_ends - 1], length, 1);
    }
    return best.trie ? best.trie->expand(best, options) : std::vector<DraftToken>();
}

// The sum of survivals along the most frequent children.
double Trie::score(const Match &match, const DraftOptions &options) const {
    Point at = match.point;
    uint32_t reach = goes_to(at.node);
    double survival = 1, sum = 0;
    for (uint32_t drafted = 0; drafted < options.budget; ++drafted) {
        double count = nodes_[at.node].count;
        const double of = count + (drafted ? 0 : match.unseen);
        if (at.length < reach) {
            ++at.length;
        } else if (nodes_[at.node].degree) {
            at = {links_[nodes_[at.node].children], at.length + 1};
            reach = goes_to(at.node);
            count = nodes_[at.node].count;
        } else if (!match.local || !drafted) {
            break;
        }
        survival *= confidence_of(count, of, match.point.length + drafted);
        if (survival < options.min_survival) break;
        sum += survival;
    }
    return sum;
}

// The best tokens to follow a match, those that are likeliest to survive first.
std::vector<DraftToken> Trie::expand(const Match &match, const DraftOptions &options) const {
    std::vector<DraftToken> drafted;
    std::vector<Candidate> taken, heap;
    const auto later = [&](const Candidate &a, const Candidate &b) {
        if (a.survival != b.survival) return a.survival < b.survival;
        if (a.parent != b.parent) return a.parent > b.parent;
        return before(b.point.node, a.point.node);
    };
    const auto offer = [&](Candidate candidate, double survival, double count, double of) {
        if (!candidate.drafted) of += match.unseen;
        candidate.confidence = confidence_of(count, of, match.point.length + candidate.drafted);
        candidate.survival = survival * candidate.confidence;
        if (candidate.survival < options.min_survival || candidate.drafted >= options.budget) return;
        heap.push_back(candidate);
        std::push_heap(heap.begin(), heap.end(), later);
    };
    const auto offer_child = [&](uint32_t node, uint32_t place, uint32_t length, int32_t parent, uint32_t before_it,
                                 double survival) {
        if (place >= nodes_[node].degree) return;
        const uint32_t child = links_[nodes_[node].children + place];
        offer({0, 0, nodes_[child].token, parent, before_it, {child, length + 1}, place, 0}, survival,
              nodes_[child].count, nodes_[node].count);
    };
    const auto go_on = [&](Point at, int32_t parent, uint32_t before_it, uint32_t loop, double survival) {
        const double count = nodes_[at.node].count;
        if (!loop && at.length < goes_to(at.node)) {
            const int32_t token = string_of(at.node)[at.length];
            offer({0, 0, token, parent, before_it, {at.node, at.length + 1}, NONE, 0}, survival, count, count);
        } else if (!loop && nodes_[at.node].degree) {
            offer_child(at.node, 0, at.length, parent, before_it, survival);
        } else if (loop || (match.local && before_it)) {
            // The end of the text, which the draft follows: so it follows itself.
            if (!loop) loop = before_it;
            int32_t back = parent;
            for (uint32_t i = 1; i < loop; ++i) back = drafted[back].parent;
            offer({0, 0, drafted[back].token, parent, before_it, at, NONE, loop}, survival, count, count);
        }
    };
    go_on(match.point, -1, 0, 0, 1);
    while (!heap.empty() && static_cast<int64_t>(drafted.size()) < options.max_tokens) {
        std::pop_heap(heap.begin(), heap.end(), later);
        const Candidate best = heap.back();
        heap.pop_back();
        const auto index = static_cast<int32_t>(drafted.size());
        drafted.push_back({best.token, best.parent, best.confidence});
        taken.push_back(best);
        go_on(best.point, index, best.drafted + 1, best.loop, best.survival);
        if (!options.tree || best.place == NONE) continue;
        // In the heap of siblings, only the two under one that was taken can come next.
        const double survival = best.parent < 0 ? 1 : taken[best.parent].survival;
        for (const uint32_t place : {2 * best.place + 1, 2 * best.place + 2})
            offer_child(nodes_[best.point.node].parent, place, best.point.length - 1, best.parent, best.drafted,
                        survival);
    }
    return drafted;
}

}  // namespace sakiyomi
