// Runs of several callers on the pool, for a build with the thread sanitizer: `make sanitize`.

#include <cstdio>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "pool.h"

namespace {

constexpr int SIZE = 64, PHASES = 6, RUNS = 1000;

// Each phase needs all of the one before it: a task that starts too early finds an old number.
struct Work {
    std::vector<long> a = std::vector<long>(SIZE), b = std::vector<long>(SIZE);
    long total = 0;

    void first(int64_t begin, int64_t end) {
        for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i)
            a[i] = b[(i + 7) % SIZE] + static_cast<long>(i);
    }
    void second(int64_t begin, int64_t end) {
        for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) b[i] = a[(i + 3) % SIZE] + 1;
    }
    void last() { total += std::accumulate(b.begin(), b.end(), 0L); }
};

long expected() {
    Work work;
    for (int phase = 0; phase < PHASES; ++phase) {
        work.first(0, SIZE);
        work.second(0, SIZE);
        work.last();
    }
    return work.total;
}

void call(int caller, std::atomic<int> &wrong) {
    for (int run = 0; run < RUNS; ++run) {
        const auto work = std::make_shared<Work>();
        sakiyomi::Pool::instance().run(1 + (run + caller) % 4, [work](sakiyomi::Team &team) {
            for (int phase = 0; phase < PHASES; ++phase) {
                team.phase(SIZE, 3, [&](int64_t begin, int64_t end) { work->first(begin, end); });
                team.phase(
                    SIZE, 5, [&](int64_t begin, int64_t end) { work->second(begin, end); }, [&] { work->last(); });
            }
        });
        if (work->total != expected()) ++wrong;
    }
}

}  // namespace

int main() {
    std::atomic<int> wrong{0};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller) callers.emplace_back(call, caller, std::ref(wrong));
    for (std::thread &caller : callers) caller.join();
    std::printf("pool: %d of %d runs wrong\n", wrong.load(), 3 * RUNS);
    return wrong.load() != 0;
}
