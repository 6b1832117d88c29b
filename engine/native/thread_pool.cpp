#include "thread_pool.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace headrace {
namespace {

struct Job {
    const std::function<void(int64_t)>* task;
    int64_t items;
    std::atomic<int64_t> next{0};

    void work() {
        for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) (*task)(item);
    }
};

// `job` is null, or the one that helpers may join; it stays alive until `working` is 0 again. `seats` helpers may still join.
class Pool {
  public:
    bool try_run(Job& job, int helpers) {
        std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
        if (!owner) return false;
        grow(helpers);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = &job;
            seats_ = helpers;
        }
        for (int i = 0; i < helpers; ++i) wake_.notify_one();
        job.work();
        std::unique_lock<std::mutex> lock(mutex_);
        job_ = nullptr;
        idle_.wait(lock, [&] { return working_ == 0; });
        return true;
    }

  private:
    void grow(int helpers) {
        for (; threads_ < helpers; ++threads_) std::thread([this] { help(); }).detach();
    }

    [[noreturn]] void help() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return job_ && seats_ > 0; });
            Job* job = job_;
            --seats_;
            ++working_;
            lock.unlock();
            job->work();
            lock.lock();
            if (--working_ == 0) idle_.notify_one();
        }
    }

    std::mutex owner_, mutex_;
    std::condition_variable wake_, idle_;
    Job* job_ = nullptr;
    int seats_ = 0, working_ = 0, threads_ = 0;
};

// Never destroyed: its threads sleep until the process ends. A forked child has none of them and gets a pool of its own.
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        pool = new Pool;
        pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
    });
    return *pool;
}

}  // namespace

void parallel_for(int64_t items, int threads, const std::function<void(int64_t)>& task) {
    Job job{&task, items};
    int helpers = int(std::min<int64_t>(threads, items)) - 1;
    if (helpers <= 0 || !the_pool().try_run(job, helpers)) job.work();
}

}  // namespace headrace
