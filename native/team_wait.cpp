#include "team_wait.h"

#include <dirent.h>
#include <fcntl.h>
#include <omp.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace winnow {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Between two looks at the run queues, while the process computes and while it does not.
constexpr milliseconds BUSY_INTERVAL{50}, IDLE_INTERVAL{250};
/// Part of an interval that the process computes at least when it is not idle.
constexpr double BUSY_FROM = 0.05;
/// Waits stay short until the queues were empty for so long.
constexpr milliseconds CALM{300};
/// Part of an interval that threads may stand in queues, added up, before the machine counts as shared. Alone on a machine it
/// is under 1 %, beside one busy process per processor 50-100 %.
constexpr double SHARED_FROM = 0.1;

/// A team that is larger by one than what makes libgomp's threads outnumber the processors.
void hold_sleeping_threads() {
  const int extra = omp_get_num_procs() + 1;
#pragma omp parallel num_threads(extra)
  {
    // An empty region might be compiled away, and its threads with it.
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
}

int64_t processor_time_ns() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return int64_t{1'000'000'000} * time.tv_sec + time.tv_nsec;
}

}  // namespace

int64_t run_queue_delay_ns() {
#ifdef __linux__
  DIR *tasks = opendir("/proc/self/task");
  if (!tasks) return -1;
  int64_t total = -1;
  while (const dirent *task = readdir(tasks)) {
    if (task->d_name[0] == '.') continue;
    char path[64], text[96];
    std::snprintf(path, sizeof path, "%.20s/schedstat", task->d_name);
    const int file = openat(dirfd(tasks), path, O_RDONLY | O_CLOEXEC);
    if (file < 0) continue;  // the thread has ended
    const ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    if (size <= 0) continue;
    text[size] = 0;
    long long on_cpu = 0, waited = 0;
    if (std::sscanf(text, "%lld %lld", &on_cpu, &waited) == 2) total = std::max<int64_t>(total, 0) + waited;
  }
  closedir(tasks);
  return total;
#else
  return -1;
#endif
}

void release_team() { omp_pause_resource(omp_pause_soft, omp_get_initial_device()); }

TeamWait::TeamWait() : owner_(getpid()) {
  if (omp_get_num_procs() > 1 && run_queue_delay_ns() >= 0) thread_ = std::thread([this] { watch(); });
}

TeamWait::~TeamWait() { stop(); }

void TeamWait::stop() {
  if (!thread_.joinable()) return;
  if (owner_ != getpid()) {
    thread_.detach();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void TeamWait::watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  Clock::time_point looked = Clock::now(), shared = looked - CALM;
  int64_t delay = run_queue_delay_ns(), computed = processor_time_ns();
  milliseconds interval = BUSY_INTERVAL;
  while (!changed_.wait_for(lock, interval, [this] { return stopping_; })) {
    const Clock::time_point now = Clock::now();
    const double elapsed = std::chrono::duration<double, std::nano>(now - looked).count();
    const int64_t delay_before = delay, computed_before = computed;
    looked = now, delay = run_queue_delay_ns(), computed = processor_time_ns();
    interval = computed - computed_before > BUSY_FROM * elapsed ? BUSY_INTERVAL : IDLE_INTERVAL;
    // Threads that ended take their delays along, and a sum may fall: that says nothing.
    if (delay - delay_before > SHARED_FROM * elapsed) shared = now;
    const bool is_shared = now - shared < CALM;
    if (is_shared == short_) continue;
    is_shared ? hold_sleeping_threads() : release_team();
    short_ = is_shared;
  }
  if (short_.exchange(false)) release_team();
}

}  // namespace winnow
