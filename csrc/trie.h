// Counted suffix tries: how often each run of up to `depth` tokens occurs in some texts, and what follows it.
// After SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975).
//
// A node stands for a run of tokens, its string. Paths are compressed: there is a node where an occurrence ends (the
// text does, or the run is `depth` long) and where occurrences part, nowhere else; so there are at most two per token.
// A node's string is read from the text, where its most recent occurrence is. Occurrences are forgotten in the order in
// which they began, so that one is there as long as the node is. Those of texts that are kept count as later than all
// others.
//
// A node of count 1 is a leaf, and its string reaches as far as its text or `depth` allow: it grows by itself. So a
// token costs something only for those ends of its text that have occurred before.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

namespace sakiyomi {

struct DraftOptions {
    int64_t budget;       // tokens in a row; no more than max_tokens, whatever it says
    double min_survival;  // of the last token; more than 0, at most 1
    bool tree;            // or a chain
    int64_t max_tokens;   // in all
};

struct DraftToken {
    int32_t token, parent;  // parent: the place of the token before it, -1 for a first one
    double confidence;
};

class Trie {
  public:
    // max_tokens: how many are remembered, but for those of texts that are kept; 0 for all.
    Trie(int64_t depth, int64_t max_tokens);

    int64_t begin(bool kept);  // a new text, empty; what is kept is never forgotten, and in neither size nor read
    void append(int64_t text, const int32_t *tokens, int64_t count);
    void end(int64_t text);  // nothing will be appended

    int64_t depth() const { return depth_; }
    int64_t size() const;   // tokens remembered
    int64_t nodes() const;  // but for the root
    int64_t bytes() const;

    int64_t count(const int32_t *tokens, int64_t count) const;
    // What follows a run of tokens, most frequent first: up to `most` tokens and how often each does.
    int64_t following(const int32_t *tokens, int64_t count, int64_t most, int32_t *next, int64_t *counts) const;
    // How often the last 1, 2, .. tokens of a text occur: at most depth - 1 counts.
    int64_t ends(int64_t text, int64_t *counts) const;
    // The tokens in the order in which they came, and the number of each one's text: nothing if there is room for fewer
    // than there are. Returns how many there are.
    int64_t read(int64_t room, int32_t *tokens, int64_t *texts) const;

    // What is likely to follow the text of `local`, from both tries. The text of `global` is an end of the other one.
    static std::vector<DraftToken> draft(const Trie &local, int64_t local_text, const Trie &global, int64_t global_text,
                                         const DraftOptions &options);

  private:
    static constexpr uint32_t ROOT = 0, NONE = UINT32_MAX;
    static constexpr int CLASSES = 32;  // of blocks of children, by the power of two that they have room for
    // As many children are looked through; those of a node that has more are in the table too.
    static constexpr uint32_t FEW = 4;

    struct Node {
        uint32_t count = 0, parent = 0;
        int32_t token = 0;                  // the first after the parent's string
        uint32_t text = 0, position = 0;    // where the string began last
        uint32_t place = 0;                 // among the children of the parent
        uint32_t children = 0, degree = 0;  // a block of links_: a heap, the most frequent child first
        uint16_t length = 0;                // of the string; a leaf of count 1 has a length of its own
        uint16_t room = 0;                  // the class of the block
    };

    struct Text {
        std::vector<int32_t> tokens;            // from position `base` on
        std::vector<uint32_t> times;            // of the tokens: how many came before, in all texts, modulo 2^32
        std::vector<uint32_t> points;           // by start % depth: the node of the end of the text that starts there
        uint32_t base = 0, first = 0, end = 0;  // positions; what is before `first` is forgotten
        uint32_t uses = 0;                      // of this place, so that no two texts have the same number
        uint32_t next = NONE;                   // of the free ones
        bool open = false, kept = false;

        const int32_t *at(uint32_t position) const { return tokens.data() + (position - base); }
    };

    struct Run {
        uint32_t text, count;
    };

    // A string that need not end at a node: `length` tokens of the node's, and of what follows its last occurrence.
    struct Point {
        uint32_t node, length;
    };

    // A token that could be drafted next.
    struct Candidate {
        double survival, confidence;
        int32_t token, parent;
        uint32_t drafted;  // tokens on the path before it
        Point point;       // after it
        uint32_t place;    // in the heap that the point's node is in; NONE where there was no choice
        uint32_t loop;     // where the draft follows itself: how far back
    };

    // What was matched, and how the draft from there fares.
    struct Match {
        const Trie *trie = nullptr;
        Point point{};
        bool local = false;
        double unseen = 0;  // 1 where the occurrences counted don't include the end of the text itself
        double score = 0;
    };

    // Appending and forgetting.
    void add(uint32_t id, int32_t token);
    uint32_t advance(uint32_t at, uint32_t length, uint32_t id, uint32_t start, int32_t token);
    void forget();
    void settle(uint32_t node);
    void absorb(uint32_t node, uint32_t child);
    void clear() noexcept;
    void release(uint32_t id) noexcept;

    // Nodes and their children.
    uint32_t make(uint32_t count, uint32_t id, uint32_t start);
    void free(uint32_t node) noexcept;
    uint32_t find(uint32_t node, int32_t token) const;
    void attach(uint32_t node, uint32_t child);
    void detach(uint32_t node, uint32_t child);
    void resize_block(uint32_t node, uint16_t room);
    uint32_t take_block(uint16_t room);
    void give_block(uint32_t block, uint16_t room) noexcept;
    uint32_t length_of(uint32_t node) const;
    uint32_t goes_to(uint32_t node) const;
    const int32_t *string_of(uint32_t node) const;
    bool began_later(uint32_t text, uint32_t position, uint32_t than_text, uint32_t than_position) const;
    void saw(uint32_t node, uint32_t id, uint32_t start);
    bool before(uint32_t a, uint32_t b) const;  // among siblings
    void sift_up(uint32_t node);
    void sift_down(uint32_t node);

    // The table of children.
    size_t slot_of(uint32_t parent, int32_t token) const;
    size_t slot_with(uint32_t node) const;
    void enter(uint32_t node);
    void remove(uint32_t node);

    uint32_t opened(int64_t text) const;
    bool locate(const int32_t *tokens, int64_t count, Point &point) const;
    uint32_t known_ends(const Text &text) const;
    double score(const Match &match, const DraftOptions &options) const;
    std::vector<DraftToken> expand(const Match &match, const DraftOptions &options) const;

    const uint32_t depth_;
    const int64_t max_tokens_;
    int64_t size_ = 0, kept_ = 0;
    uint32_t now_ = 0;
    std::vector<Node> nodes_;
    uint32_t spare_node_ = NONE;
    int64_t node_count_ = 0;
    std::vector<uint32_t> links_;
    uint32_t spare_blocks_[CLASSES];
    std::vector<uint32_t> table_;  // open addressing; 0 where nothing is
    size_t entries_ = 0;
    std::vector<Text> texts_;
    uint32_t spare_text_ = NONE;
    std::deque<Run> runs_;  // the texts that tokens came to, oldest first
    mutable std::mutex mutex_;
};

}  // namespace sakiyomi
