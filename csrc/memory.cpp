#include <mutex>

#include "layout.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sakiyomi {

void prefer_large_pages(char *data, int64_t size) {
#if defined(__linux__)
    madvise(data, static_cast<size_t>(size), MADV_HUGEPAGE);  // refused, pages are small: slower, not wrong
#else
    (void)data;
    (void)size;
#endif
}

namespace {

constexpr int64_t CHUNK = int64_t{64} << 20;

struct Chunk {
    explicit Chunk(int64_t size) : memory(size) {}
    Buffer memory;
    int64_t used = 0;
};

}  // namespace

WeightMemory::WeightMemory(int64_t size) : size_(size) {
    static std::mutex mutex;
    static std::weak_ptr<Chunk> latest;
    const int64_t needed = round_up(size, CACHE_LINE);
    const std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<Chunk> chunk = latest.lock();
    if (!chunk || chunk->used + needed > chunk->memory.size()) {
        chunk = std::make_shared<Chunk>(std::max(CHUNK, needed));
        latest = chunk;
    }
    data_ = chunk->memory.data() + chunk->used;
    chunk->used += needed;
    chunk_ = chunk;
}

}  // namespace sakiyomi
