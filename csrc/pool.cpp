#include "pool.h"

#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace sakiyomi {

namespace {

// Never destroyed: its threads may outlive main().
std::atomic<Pool *> the_pool{nullptr};

}  // namespace

Pool &Pool::instance() {
    Pool *pool = the_pool.load();
    if (pool) return *pool;
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!the_pool.load()) {
        the_pool.store(new Pool);
#if !defined(_WIN32)
        // A child of fork() has none of the threads and perhaps a locked mutex: it starts afresh.
        static std::once_flag once;
        std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { the_pool.store(new Pool); }); });
#endif
    }
    return *the_pool.load();
}

void Pool::run(int threads, std::function<void(Team &)> program) {
    auto run = std::make_shared<Run>();
    run->program = std::move(program);
    if (threads <= 1) {
        Team team(*run, 0, 1);
        run->program(team);
        return;
    }
    std::unique_lock<std::mutex> lock(turn_mutex_);
    const uint64_t ticket = next_ticket_++;
    turn_changed_.wait(lock, [&] { return turn_ == ticket; });
    lock.unlock();

    // Where the system gives no more threads, the work is done by those that there are.
    try {
        while (static_cast<int>(threads_.size()) < threads - 1)
            threads_.emplace_back(&Pool::work, this, static_cast<int>(threads_.size()) + 1);
    } catch (const std::system_error &) {
    }
    {
        const std::lock_guard<std::mutex> offer_lock(offer_mutex_);
        offer_ = run;
        offer_threads_ = threads;
        offered_.fetch_add(1);
    }
    gate_.wake();
    Team team(*run, 0, threads);
    run->program(team);

    {
        const std::lock_guard<std::mutex> offer_lock(offer_mutex_);
        offer_.reset();
    }
    lock.lock();
    ++turn_;
    turn_changed_.notify_all();
}

void Pool::work(int index) {
    uint64_t known = 0;
    for (;;) {
        gate_.await([&] { return offered_.load() != known; });
        std::shared_ptr<Run> run;
        int threads;
        {
            const std::lock_guard<std::mutex> lock(offer_mutex_);
            known = offered_.load();
            run = offer_;
            threads = offer_threads_;
        }
        if (!run || index >= threads) continue;
        Team team(*run, index, threads);
        run->program(team);
    }
}

}  // namespace sakiyomi
