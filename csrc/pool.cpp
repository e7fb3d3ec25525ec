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
    static const bool made = [] {
#if !defined(_WIN32)
        // A child of fork() has none of the threads and perhaps a locked mutex: it starts afresh.
        pthread_atfork(nullptr, nullptr, [] { the_pool.store(new Pool); });
#endif
        the_pool.store(new Pool);
        return true;
    }();
    (void)made;
    return *the_pool.load();
}

// A caller's turn: nobody else runs anything until it ends.
class Pool::Turn {
  public:
    explicit Turn(Pool &pool) : pool_(pool) {
        std::unique_lock<std::mutex> lock(pool.turn_mutex_);
        const uint64_t ticket = pool.next_ticket_++;
        pool.turn_changed_.wait(lock, [&] { return pool.turn_ == ticket; });
    }
    Turn(const Turn &) = delete;
    Turn &operator=(const Turn &) = delete;
    ~Turn() {
        pool_.offer(nullptr, 0);
        const std::lock_guard<std::mutex> lock(pool_.turn_mutex_);
        ++pool_.turn_;
        pool_.turn_changed_.notify_all();
    }

  private:
    Pool &pool_;
};

void Pool::offer(std::shared_ptr<Run> run, int threads) {
    const std::lock_guard<std::mutex> lock(offer_mutex_);
    offer_ = std::move(run);
    offer_threads_ = threads;
    if (offer_) offered_.fetch_add(1);
}

void Pool::run(int threads, std::function<void(Team &)> program) {
    auto run = std::make_shared<Run>();
    run->program = std::move(program);
    if (threads <= 1) {
        Team team(*run, 0, 1);
        run->program(team);
        return;
    }
    const Turn turn(*this);
    try {
        for (; workers_ < threads - 1; ++workers_) std::thread(&Pool::work, this, workers_ + 1).detach();
    } catch (const std::system_error &) {  // no more threads are to be had: those that there are do the work
    }
    offer(run, threads);
    gate_.wake();
    Team team(*run, 0, threads);
    run->program(team);
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
