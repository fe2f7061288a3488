// How OpenMP's threads wait for each other, adapted to what else runs on the machine.
//
// Threads that have their processors to themselves should spin at barriers: sleeping and waking costs more than a small
// kernel. Beside other work they should sleep: a spinning thread uses up the time slice that the thread it waits for needs,
// and a decode step of 0.3 ms takes 100 ms (two cores, two busy processes beside). libgomp reads the choice from environment
// variables once, when it is loaded, with one exception: while more OpenMP threads exist than processors, waits are short
// (`gomp_throttled_spin_count_var`). TeamWait watches how long this process's threads stand in run queues and, while that
// is more than SHARED_FROM, keeps sleeping OpenMP threads beyond the number of processors. This reaches every user of the
// runtime, torch's operators included. Other OpenMP runtimes than libgomp are not affected.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace winnow {

class TeamWait {
 public:
  /// Starts watching, in a thread of its own.
  TeamWait();
  ~TeamWait();
  TeamWait(const TeamWait &) = delete;
  TeamWait &operator=(const TeamWait &) = delete;

  /// Whether waits are short at the moment.
  bool is_short() const { return short_; }

  /// Stops watching and lets waits be as long as the runtime's default. Does nothing the second time.
  void stop();

 private:
  void watch();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> short_{false};
  bool stopping_ = false;
  int owner_;  // process id: a forked child has no such thread to join
  std::thread thread_;
};

/// Nanoseconds that threads of this process have been ready to run while no processor was free for them, over all threads
/// that exist now. -1 where the system does not report it.
int64_t run_queue_delay_ns();

/// Ends the OpenMP threads that wait for the calling thread's next parallel region, which starts them anew. They count as
/// threads of the process, so that another thread's team would wait shortly from then on.
void release_team();

}  // namespace winnow
