// What the twin knows of a core: memories that know which bytes were written and by which instruction, pipes with clocks, flags.
//
// Instructions run one after another in program order, so results are those of a correctly synchronised kernel. Whether the
// kernel is one is decided beside it: every instruction of a pipe has a number, and each pipe knows up to which number the other
// pipes are sure to have finished (a vector clock, carried by Set/WaitFlag, PipeBarrier and cross-core flags). An access to
// bytes that another instruction wrote, or a write to bytes that another one reads, without that knowledge is a fault, on the
// same pipe too (a dependent instruction needs PipeBarrier).
#pragma once

#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "types.h"

namespace twin {

enum class KernelType { kAivOnly, kMixAic12 };

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
[[noreturn]] void Fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Fault(text.str());
}

// Bytes per cycle of a pipe: CANN's platform configuration of Ascend910B (docs/ascend.md); L1 -> L0B is assumed to be half of L1 -> L0A.
constexpr double kGmRead = 110, kUbToGm = 64, kL0cToGm = 86, kL1ToL0a = 512, kL1ToL0b = 256;
constexpr uint32_t kUbBytes = 184 * 1024;  // 192 KB, of which TPipe keeps 8
constexpr uint32_t kL1Bytes = 512 * 1024 - 128, kL0aBytes = 64 * 1024, kL0bBytes = 64 * 1024, kL0cBytes = 128 * 1024;
constexpr int kPipes = 7, kEventIds = 8, kMaxGroups = 24, kCrossFlags = 11, kCrossMax = 15;
constexpr uint32_t kBlock = 32;

inline int Index(pipe_t pipe) { return pipe == PIPE_FIX ? 6 : int(pipe); }
inline const char* Name(int pipe) {
  static const char* names[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX"};
  return names[pipe];
}

using Clock = std::vector<uint32_t>;  // by agent = core * kPipes + pipe: instructions known to have finished

inline void Merge(Clock& into, const Clock& other) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
}

struct Access {
  uint32_t number;
  uint16_t agent;
  bool write;
  uint32_t bytes;  // one bit for each byte of a 32 B block
};

// A memory of a core, or a buffer in GM. `written` has one entry a byte; `log` the accesses that later ones may depend on.
struct Memory {
  std::string name;
  uint8_t* data = nullptr;
  uint32_t alignment = 1;
  uint64_t size = 0;
  bool read_only = false;
  bool global = false;
  std::vector<uint8_t> own, written;
  std::vector<std::vector<Access>> log;

  void Allocate(const std::string& name_, uint32_t bytes, uint32_t alignment_) {
    name = name_;
    size = bytes;
    alignment = alignment_;
    own.assign(bytes, 0xff);  // NaN in every floating-point type
    written.assign(bytes, 0);
    log.resize((bytes + kBlock - 1) / kBlock);
    data = own.data();
  }

  void Poison(uint64_t begin, uint64_t bytes) {
    std::fill_n(data + begin, bytes, 0xff);
    std::fill_n(written.begin() + begin, bytes, 0);
  }
};

struct Signal {
  Clock clock;
  double time = 0;
};

struct Counts {
  double gm_to_ub = 0, ub_to_gm = 0, gm_to_l1 = 0, l1_to_l0 = 0, l0c_to_gm = 0;  // bytes
  double instructions = 0;
  std::array<double, kPipes> busy{};  // cycles by pipe, over all cores
  double critical = 0;                // cycles until the last pipe of the last core has finished

  void Add(const Counts& other) {
    gm_to_ub += other.gm_to_ub;
    ub_to_gm += other.ub_to_gm;
    gm_to_l1 += other.gm_to_l1;
    l1_to_l0 += other.l1_to_l0;
    l0c_to_gm += other.l0c_to_gm;
    instructions += other.instructions;
    for (int pipe = 0; pipe < kPipes; ++pipe) busy[pipe] += other.busy[pipe];
    critical = std::max(critical, other.critical);
  }
};

struct QueueBuffer {
  Memory* memory = nullptr;
  uint32_t offset = 0, bytes = 0;
  enum { kFree, kAllocated, kQueued, kTaken } state = kFree;
  int ready = -1, free = -1;  // event ids held
  AscendC::HardEvent freed = AscendC::HardEvent::COUNT;  // the event of `free`
};

struct Machine;

struct Core {
  Machine* machine = nullptr;
  int index = 0, group = 0, sub = 0;
  bool cube = false;
  Memory ub, l1, l0a, l0b, l0c;
  std::array<Clock, kPipes> clock;
  std::array<uint32_t, kPipes> issued{};
  std::array<double, kPipes> time{};
  std::array<std::vector<std::pair<const char*, int>>, kPipes> history;  // name and source line of every instruction
  std::array<std::array<std::unique_ptr<Signal>, kEventIds>, int(AscendC::HardEvent::COUNT)> flags;
  std::array<uint8_t, int(AscendC::HardEvent::COUNT)> reserved{};  // event ids held by queues or AllocEventID
  std::deque<QueueBuffer> buffers;
  bool has_pipe = false;
  Counts counts;
  std::function<bool()> blocked;  // what this core waits for; empty: it can run
  std::string waiting;
  bool finished = false;

  int Agent(int pipe) const { return index * kPipes + pipe; }
  std::string Where() const {
    return (cube ? "AIC " : "AIV ") + std::to_string(group) + (cube ? "" : "." + std::to_string(sub));
  }
};

struct Machine {
  KernelType type = KernelType::kAivOnly;
  int groups = 1, subs = 1;  // subs: vector cores of a group
  int skipped_barrier = 0;   // source line whose PipeBarrier is ignored
  std::deque<Memory> global;
  std::deque<Core> cores;
  std::vector<int> order;  // in which cores are preferred when several can run
  // Cross-core flags: cube -> each vector core, vector core -> cube (mode 2); every core of a kind (mode 0).
  std::vector<std::array<std::deque<Signal>, kCrossFlags>> to_core, from_core;
  std::mutex mutex;
  std::condition_variable turn_changed;
  int turn = -1;
  std::string fault;

  // Gives the turn to a core that can run. Called with the mutex held.
  void Next() {
    turn = -1;
    bool unfinished = false;
    for (int index : order) {
      Core& core = cores[index];
      if (core.finished) continue;
      unfinished = true;
      if (!core.blocked || !fault.empty() || core.blocked()) {
        turn = index;
        break;
      }
    }
    if (turn < 0 && unfinished) {
      fault = "deadlock:";
      for (Core& core : cores)
        if (!core.finished) fault += " " + core.Where() + " waits for " + core.waiting + ";";
      Next();
      return;
    }
    turn_changed.notify_all();
  }

  void WaitForTurn(Core& core) {
    std::unique_lock<std::mutex> lock(mutex);
    turn_changed.wait(lock, [&] { return turn == core.index; });
    core.blocked = nullptr;
    if (!fault.empty()) throw Fault("stopped");
  }

  // Lets other cores run until `ready`.
  void Block(Core& core, const std::string& what, std::function<bool()> ready) {
    if (ready()) return;
    {
      std::unique_lock<std::mutex> lock(mutex);
      core.waiting = what;
      core.blocked = std::move(ready);
      Next();
    }
    WaitForTurn(core);
  }
};

inline thread_local Core* current = nullptr;

inline Core& core() {
  if (!current) throw Fault("an AscendC call outside a kernel");
  return *current;
}

// One instruction: numbered, checked access by access, timed by `Finish`.
class Instruction {
 public:
  Instruction(const char* name, pipe_t pipe, int line) : core_(core()), pipe_(Index(pipe)), name_(name), line_(line) {
    number_ = ++core_.issued[pipe_];
    core_.history[pipe_].push_back({name, line});
    core_.counts.instructions += 1;
  }

  // `accumulates`: the pipe itself orders this access after an earlier one of the same pipe.
  void Read(Memory& memory, uint64_t begin, uint64_t bytes, bool accumulates = false) {
    Touch(memory, begin, bytes, false, accumulates);
  }
  void Write(Memory& memory, uint64_t begin, uint64_t bytes, bool accumulates = false) {
    if (memory.read_only) Fail(*this, "writes ", memory.name, ", which is an input");
    Touch(memory, begin, bytes, true, accumulates);
  }

  // The bytes must have been written.
  void Defined(const Memory& memory, uint64_t begin, uint64_t bytes) const {
    if (memory.written.empty() || !bytes) return;
    const void* hole = std::memchr(memory.written.data() + begin, 0, bytes);
    if (hole)
      Fail(*this, "reads unwritten memory: ", memory.name, " at byte ", static_cast<const uint8_t*>(hole) - memory.written.data());
  }

  void Finish(double cycles) {
    double& time = core_.time[pipe_];
    time = std::max(time, core_.time[PIPE_S]) + cycles;
    core_.counts.busy[pipe_] += cycles;
  }

  friend std::ostream& operator<<(std::ostream& out, const Instruction& self) {
    return out << self.core_.Where() << ": " << self.name_ << " (line " << self.line_ << ") ";
  }

 private:
  bool Finished(const Access& access) const {
    if (core_.clock[pipe_][access.agent] >= access.number || core_.clock[PIPE_S][access.agent] >= access.number) return true;
    const bool own = access.agent == core_.Agent(pipe_);
    if (own && access.number == number_) return true;
    // The scalar unit runs in order and issues the others: what it has read, it has read.
    return access.agent == core_.Agent(PIPE_S) && (pipe_ == PIPE_S || !access.write);
  }

  void Touch(Memory& memory, uint64_t begin, uint64_t bytes, bool write, bool accumulates) {
    if (begin + bytes > memory.size)
      Fail(*this, "goes beyond ", memory.name, ": byte ", begin + bytes, " of ", memory.size);
    if (memory.log.empty()) return;
    const uint64_t end = begin + bytes;
    for (uint64_t block = begin / kBlock; block * kBlock < end; ++block) {
      const uint64_t first = std::max(begin, block * kBlock) - block * kBlock, last = std::min(end - block * kBlock, uint64_t(kBlock));
      const uint32_t mask = (last == 32 ? ~0u : (1u << last) - 1) & ~((1u << first) - 1);
      auto& log = memory.log[block];
      const Access* missing = nullptr;  // the first of another pipe, if there is one: its flag orders the own pipe's too
      for (const Access& access : log) {
        if (!(access.bytes & mask) || !(write || access.write) || Finished(access)) continue;
        const bool own = access.agent == core_.Agent(pipe_);
        if (own && (accumulates || missing)) continue;
        if (!missing || missing->agent == core_.Agent(pipe_)) missing = &access;
      }
      if (missing) Missing(memory, block * kBlock, *missing, write);
      if (write) {
        for (Access& access : log) access.bytes &= ~mask;
        log.erase(std::remove_if(log.begin(), log.end(), [](const Access& access) { return !access.bytes; }), log.end());
      }
      const uint16_t agent = uint16_t(core_.Agent(pipe_));
      auto same = std::find_if(log.begin(), log.end(), [&](const Access& access) { return access.agent == agent && access.write == write; });
      // An older write by this pipe to other bytes of the block may be forgotten only if it is known to have finished.
      if (same == log.end() || (write && same->number != number_))
        log.push_back({number_, agent, write, mask});
      else
        *same = {number_, agent, write, same->bytes | mask};
    }
  }

  [[noreturn]] void Missing(const Memory& memory, uint64_t byte, const Access& access, bool write) const {
    const Core& other = core_.machine->cores[access.agent / kPipes];
    const int pipe = access.agent % kPipes;
    const auto& [name, line] = other.history[pipe][access.number - 1];
    std::string remedy = &other != &core_ ? "a cross-core flag"
                         : pipe == pipe_  ? std::string("PipeBarrier<PIPE_") + Name(pipe) + ">"
                                          : std::string("Set/WaitFlag ") + Name(pipe) + "_" + Name(pipe_);
    Fail(*this, write ? "writes " : "reads ", memory.name, " at byte ", byte, ", which ", name, " (line ", line, ") of ",
         other.Where(), access.write ? " wrote" : " reads", ", without ", remedy, " between them");
  }

  Core& core_;
  int pipe_;
  const char* name_;
  int line_;
  uint32_t number_;
};

// Where an address of GM lies. Only operands of the launch exist.
inline std::pair<Memory*, uint64_t> Global(const void* address, const Instruction& by) {
  const uint8_t* byte = static_cast<const uint8_t*>(address);
  for (Memory& memory : core().machine->global)
    if (byte >= memory.data && byte < memory.data + memory.size) return {&memory, uint64_t(byte - memory.data)};
  Fail(by, "uses an address of GM that is in no operand");
}

}  // namespace twin
