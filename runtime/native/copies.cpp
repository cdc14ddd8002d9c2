// Copies of rows from the host: at once, by the threads that compute, or by a thread that does nothing else. The former
// take one before their share of the next product of weights, so that no such thread contends with them for cores. See
// copies.py.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "stage.h"

namespace {

enum State : int64_t { kIdle, kPending, kRunning, kDone };

}  // namespace

extern "C" {

struct SpecacheCopy;

// Copies that are pending, the oldest first.
struct SpecacheCopyQueue {
  SpecacheCopy *oldest, *newest;
  int64_t ended;  // its thread is to return
};

struct SpecacheCopy {
  SpecacheStage stage;
  int64_t failed;              // what `specache_stage` returned
  std::atomic<int64_t> state;  // whoever puts it to kRunning makes the copy
  int64_t thread;              // the system's number of who made it
  double start, stop;          // seconds of the steady clock
  SpecacheCopyQueue* queue;    // of a thread; null for the next product
  SpecacheCopy* next;
};
}

namespace {

// Never destroyed: a thread may still wait when the process ends.
std::mutex& lock = *new std::mutex;  // of all queues
std::condition_variable &came = *new std::condition_variable, &made = *new std::condition_variable;
SpecacheCopyQueue of_products{};
std::atomic<int64_t> num_left_to_products{0};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

SpecacheCopyQueue& queue_of(const SpecacheCopy* copy) { return copy->queue == nullptr ? of_products : *copy->queue; }

// Takes a copy off its queue, with the lock; null where it is not there.
SpecacheCopy* take(SpecacheCopyQueue& queue, const SpecacheCopy* wanted) {
  SpecacheCopy *before = nullptr, *copy = queue.oldest;
  for (; copy != nullptr && copy != wanted; copy = copy->next) before = copy;
  if (copy == nullptr) return nullptr;
  (before == nullptr ? queue.oldest : before->next) = copy->next;
  if (queue.newest == copy) queue.newest = before;
  if (&queue == &of_products) num_left_to_products--;
  copy->state.store(kRunning, std::memory_order_relaxed);
  return copy;
}

void make(SpecacheCopy* copy) {
  copy->thread = syscall(SYS_gettid);
  copy->start = now();
  copy->failed = specache::stage(&copy->stage);
  copy->stop = now();
  {
    const std::lock_guard<std::mutex> held(lock);
    copy->state.store(kDone, std::memory_order_release);  // from here on it may be gone
  }
  made.notify_all();
}

}  // namespace

extern "C" {

int64_t specache_copy_size() { return sizeof(SpecacheCopy); }

int64_t specache_stage(SpecacheStage* stage) { return specache::stage(stage); }

// Leaves a copy to its queue. It, and what it points to, must stay until `specache_copy_finish`.
void specache_copy_start(SpecacheCopy* copy) {
  {
    std::unique_lock<std::mutex> held(lock);
    // An interrupt may have kept Python from noting that it was started before.
    made.wait(held, [copy] { return copy->state.load(std::memory_order_relaxed) != kRunning; });
    if (copy->state.load(std::memory_order_relaxed) == kPending) return;
    SpecacheCopyQueue& queue = queue_of(copy);
    copy->state.store(kPending, std::memory_order_relaxed);
    copy->next = nullptr;
    (queue.oldest == nullptr ? queue.oldest : queue.newest->next) = copy;
    queue.newest = copy;
    if (&queue == &of_products) num_left_to_products++;
  }
  if (copy->queue != nullptr) came.notify_all();
}

// Makes the copies that are left to products.
void specache_copies_make() {
  while (num_left_to_products.load(std::memory_order_relaxed) > 0) {
    std::unique_lock<std::mutex> held(lock);
    SpecacheCopy* const copy = take(of_products, of_products.oldest);
    held.unlock();
    if (copy == nullptr) return;
    make(copy);
  }
}

// Makes the copies of a queue as they come, until it has ended and is empty.
void specache_copies_serve(SpecacheCopyQueue* queue) {
  std::unique_lock<std::mutex> held(lock);
  while (true) {
    came.wait(held, [queue] { return queue->oldest != nullptr || queue->ended; });
    if (queue->oldest == nullptr) return;
    SpecacheCopy* const copy = take(*queue, queue->oldest);
    held.unlock();
    make(copy);
    held.lock();
  }
}

// Has the thread of a queue return.
void specache_copies_end(SpecacheCopyQueue* queue) {
  {
    const std::lock_guard<std::mutex> held(lock);
    queue->ended = 1;
  }
  came.notify_all();
}

// Returns when a copy is through: made here, and then 1, where nobody had taken it. 2 where it is not after `seconds`.
int64_t specache_copy_finish(SpecacheCopy* copy, double seconds) {
  if (copy->state.load(std::memory_order_acquire) == kDone) return 0;
  std::unique_lock<std::mutex> held(lock);
  if (copy->state.load(std::memory_order_relaxed) == kPending) {
    take(queue_of(copy), copy);
    held.unlock();
    make(copy);
    return 1;
  }
  const auto through = [copy] { return copy->state.load(std::memory_order_relaxed) != kRunning; };
  return made.wait_for(held, std::chrono::duration<double>(seconds), through) ? 0 : 2;
}
}
