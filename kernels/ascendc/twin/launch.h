// Host side of the twin: runs a kernel over its blocks, one thread a core, one core at a time.
#pragma once

#include "kernel_operator.h"

namespace twin {

struct Buffer {
  enum Kind { kInput, kInOut, kOutput, kWorkspace } kind;
  const char* name;
  const void* data;
  uint64_t bytes;
};

// How to run: groups (of an AIV_ONLY kernel: vector cores), the seed of their order, and a source line whose PipeBarrier is
// ignored (0: none), by which tests see that a barrier is needed.
struct Run {
  int32_t blocks;
  uint64_t seed;
  int32_t skipped_barrier;
};

// Throws Fault for anything a core must not do.
template <typename Kernel>
Counts Launch(KernelType type, Run how, const std::vector<Buffer>& buffers, Kernel kernel) {
  const int blocks = how.blocks;
  if (blocks < 1 || blocks > (type == KernelType::kMixAic12 ? kMaxGroups : 2 * kMaxGroups)) Fail("a launch of ", blocks, " blocks");
  volatile float least = 1e-38f;
  if (least * 0.01f == 0.0f) Fail("this thread flushes subnormals; the twin keeps them");
  Machine machine;
  machine.type = type;
  machine.groups = blocks;
  machine.skipped_barrier = how.skipped_barrier;
  machine.subs = type == KernelType::kMixAic12 ? 2 : 1;
  for (const Buffer& buffer : buffers) {
    machine.global.emplace_back();
    Memory& memory = machine.global.back();
    memory.name = std::string("GM operand ") + buffer.name;
    memory.data = const_cast<uint8_t*>(static_cast<const uint8_t*>(buffer.data));
    memory.size = buffer.bytes;
    memory.global = true;
    memory.read_only = buffer.kind == Buffer::kInput;
    if (memory.read_only) continue;
    memory.written.assign(buffer.bytes, buffer.kind == Buffer::kInOut);
    memory.log.resize((buffer.bytes + kBlock - 1) / kBlock);
    if (buffer.kind != Buffer::kInOut) std::memset(memory.data, 0xff, buffer.bytes);
  }
  const int per_group = type == KernelType::kMixAic12 ? 3 : 1, total = blocks * per_group;
  for (int index = 0; index < total; ++index) {
    machine.cores.emplace_back();
    Core& core = machine.cores.back();
    core.machine = &machine;
    core.index = index;
    core.group = index / per_group;
    core.cube = per_group == 3 && index % 3 == 0;
    core.sub = per_group == 3 && !core.cube ? index % 3 - 1 : 0;
    for (Clock& clock : core.clock) clock.assign(total * kPipes, 0);
    machine.order.push_back(index);
  }
  machine.to_core.resize(total);
  machine.from_core.resize(total);
  std::mt19937_64 random(how.seed);
  for (int i = total - 1; i > 0; --i) std::swap(machine.order[i], machine.order[random() % (i + 1)]);

  auto run = [&](Core& core) {
    current = &core;
    try {
      machine.WaitForTurn(core);
      if (core.cube) {
        core.l1.Allocate("L1", kL1Bytes, 32);
        core.l0a.Allocate("L0A", kL0aBytes, 512);
        core.l0b.Allocate("L0B", kL0bBytes, 512);
        core.l0c.Allocate("L0C", kL0cBytes, 64);
      } else {
        core.ub.Allocate("UB", kUbBytes, 32);
      }
      kernel();
      for (const QueueBuffer& buffer : core.buffers) {
        if (buffer.state != QueueBuffer::kFree) Fail(core.Where(), ": ends with a tensor of a queue that was not freed");
        // TPipe's destructor waits for the events of freed buffers.
        if (buffer.free >= 0) core.flags[int(buffer.freed)][buffer.free].reset();
      }
      for (int event = 0; event < int(AscendC::HardEvent::COUNT); ++event)
        for (int id = 0; id < kEventIds; ++id)
          if (core.flags[event][id])
            Fail(core.Where(), ": ends with flag ", NameOf(AscendC::HardEvent(event)), " ", id, " set and never waited for");
      core.counts.critical = *std::max_element(core.time.begin(), core.time.end());
    } catch (const Fault& fault) {
      std::lock_guard<std::mutex> lock(machine.mutex);
      if (machine.fault.empty()) machine.fault = fault.what();
    }
    for (Memory* memory : {&core.ub, &core.l1, &core.l0a, &core.l0b, &core.l0c}) *memory = Memory();
    std::lock_guard<std::mutex> lock(machine.mutex);
    core.finished = true;
    machine.Next();
  };
  std::vector<std::thread> threads;
  for (Core& core : machine.cores) threads.emplace_back(run, std::ref(core));
  {
    std::lock_guard<std::mutex> lock(machine.mutex);
    machine.Next();
  }
  for (std::thread& thread : threads) thread.join();
  if (machine.fault.empty())
    for (Core& core : machine.cores)
      for (int id = 0; id < kCrossFlags; ++id)
        if (!machine.to_core[core.index][id].empty() || !machine.from_core[core.index][id].empty())
          machine.fault = "cross-core flag " + std::to_string(id) + " of group " + std::to_string(core.group) + " is set and never waited for";
  if (!machine.fault.empty()) throw Fault(machine.fault);
  for (const Memory& memory : machine.global)
    if (!memory.written.empty() && memory.name.find("workspace") == std::string::npos &&
        std::memchr(memory.written.data(), 0, memory.written.size()))
      Fail(memory.name, " is not written whole");
  Counts counts;
  for (Core& core : machine.cores) counts.Add(core.counts);
  return counts;
}

}  // namespace twin
