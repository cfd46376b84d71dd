// LocalTensor, GlobalTensor, TPipe, TQue, TBuf, and the calls that order instructions.
#pragma once

#include "machine.h"

#define ASCEND_IS_AIC (::twin::core().cube)
#define ASCEND_IS_AIV (!::twin::core().cube)
#define KERNEL_TYPE_AIV_ONLY ::twin::KernelType::kAivOnly
#define KERNEL_TYPE_MIX_AIC_1_2 ::twin::KernelType::kMixAic12
#define KERNEL_TASK_TYPE_DEFAULT(type) ::twin::CheckType(type)

namespace twin {

inline void CheckType(KernelType type) {
  if (type != core().machine->type) Fail(core().Where(), ": the kernel declares another task type than it was launched with");
}

struct EventPipes {
  int from, to;
};
inline EventPipes PipesOf(AscendC::HardEvent event) {
  constexpr int S = 0, V = 1, M = 2, MTE1 = 3, MTE2 = 4, MTE3 = 5, FIX = 6;
  static const EventPipes pipes[] = {{MTE2, V},    {V, MTE2}, {V, MTE3}, {MTE3, V},  {MTE3, MTE2}, {MTE2, MTE3},
                                     {MTE2, MTE1}, {MTE1, MTE2}, {MTE1, M}, {M, MTE1}, {M, FIX},     {FIX, M},
                                     {S, V},       {V, S},    {S, MTE2}, {MTE2, S},  {S, MTE3},    {MTE3, S}};
  return pipes[int(event)];
}
inline std::string NameOf(AscendC::HardEvent event) {
  return std::string(Name(PipesOf(event).from)) + "_" + Name(PipesOf(event).to);
}

inline Signal SignalOf(int pipe) {
  Core& self = core();
  Signal signal{self.clock[pipe], std::max(self.time[pipe], self.time[PIPE_S])};
  Merge(signal.clock, self.clock[PIPE_S]);
  signal.clock[self.Agent(pipe)] = self.issued[pipe];
  return signal;
}

inline void Receive(int pipe, const Signal& signal) {
  Core& self = core();
  Merge(self.clock[pipe], signal.clock);
  self.time[pipe] = std::max(self.time[pipe], signal.time);
}

inline void Set(AscendC::HardEvent event, int id) {
  Core& self = core();
  if (id < 0 || id >= kEventIds) Fail(self.Where(), ": event id ", id, " of ", NameOf(event), "; ids are 0 to 7");
  auto& flag = self.flags[int(event)][id];
  if (flag) Fail(self.Where(), ": flag ", NameOf(event), " ", id, " is set twice without a wait");
  flag = std::make_unique<Signal>(SignalOf(PipesOf(event).from));
}

inline void Wait(AscendC::HardEvent event, int id) {
  Core& self = core();
  if (id < 0 || id >= kEventIds) Fail(self.Where(), ": event id ", id, " of ", NameOf(event), "; ids are 0 to 7");
  auto& flag = self.flags[int(event)][id];
  if (!flag) Fail(self.Where(), ": waits for flag ", NameOf(event), " ", id, ", which nobody has set: the core hangs");
  Receive(PipesOf(event).to, *flag);
  flag.reset();
}

inline int Reserve(AscendC::HardEvent event) {
  Core& self = core();
  for (int id = 0; id < kEventIds; ++id)
    if (!(self.reserved[int(event)] >> id & 1)) {
      self.reserved[int(event)] |= uint8_t(1 << id);
      return id;
    }
  Fail(self.Where(), ": all 8 event ids of ", NameOf(event), " are in use (at most 8 queue buffers for a position)");
}

inline void Release(AscendC::HardEvent event, int id) { core().reserved[int(event)] &= uint8_t(~(1 << id)); }

// Memory of a position, and the events that a queue there sets when a tensor is queued and when it is freed.
struct Place {
  Memory* memory;
  AscendC::HardEvent ready, free;
};
inline Place PlaceOf(AscendC::TPosition position) {
  using AscendC::HardEvent;
  using AscendC::TPosition;
  Core& self = core();
  const bool on_cube = position < TPosition::VECIN;
  if (on_cube != self.cube) Fail(self.Where(), ": this position does not exist on this kind of core");
  switch (position) {
    case TPosition::A1:
    case TPosition::B1: return {&self.l1, HardEvent::MTE2_MTE1, HardEvent::MTE1_MTE2};
    case TPosition::A2: return {&self.l0a, HardEvent::MTE1_M, HardEvent::M_MTE1};
    case TPosition::B2: return {&self.l0b, HardEvent::MTE1_M, HardEvent::M_MTE1};
    case TPosition::CO1: return {&self.l0c, HardEvent::M_FIX, HardEvent::FIX_M};
    case TPosition::VECIN: return {&self.ub, HardEvent::MTE2_V, HardEvent::V_MTE2};
    case TPosition::VECOUT: return {&self.ub, HardEvent::V_MTE3, HardEvent::MTE3_V};
    case TPosition::VECCALC: return {&self.ub, HardEvent::COUNT, HardEvent::COUNT};
    default: Fail(self.Where(), ": this position has no buffers");
  }
}

}  // namespace twin

namespace AscendC {

template <typename T>
class LocalTensor {
 public:
  using PrimType = T;
  LocalTensor() = default;
  LocalTensor(twin::Memory* memory, TPosition position, uint32_t offset, uint32_t bytes, twin::QueueBuffer* buffer)
      : memory_(memory), position_(position), offset_(offset), bytes_(bytes), buffer_(buffer) {}

  LocalTensor operator[](uint32_t elements) const {
    const uint64_t skipped = uint64_t(elements) * sizeof(T);
    if (skipped > bytes_) twin::Fail(twin::core().Where(), ": element ", elements, " of a tensor of ", GetSize());
    return {memory_, position_, uint32_t(offset_ + skipped), uint32_t(bytes_ - skipped), buffer_};
  }
  template <typename U>
  LocalTensor<U> ReinterpretCast() const {
    return {memory_, position_, offset_, bytes_, buffer_};
  }
  uint32_t GetSize() const { return bytes_ / sizeof(T); }

  T GetValue(uint32_t i, int line = __builtin_LINE()) const {
    twin::Instruction by("GetValue", PIPE_S, line);
    const uint64_t at = Check(by, uint64_t(i) * sizeof(T), sizeof(T), 1);
    by.Read(*memory_, at, sizeof(T));
    by.Defined(*memory_, at, sizeof(T));
    T value;
    std::memcpy(&value, memory_->data + at, sizeof(T));
    return value;
  }
  void SetValue(uint32_t i, T value, int line = __builtin_LINE()) const {
    twin::Instruction by("SetValue", PIPE_S, line);
    const uint64_t at = Check(by, uint64_t(i) * sizeof(T), sizeof(T), 1);
    by.Write(*memory_, at, sizeof(T));
    std::memcpy(memory_->data + at, &value, sizeof(T));
    std::memset(memory_->written.data() + at, 1, sizeof(T));
  }

  // For the twin's instructions: the byte of the memory where `bytes` from `begin` of this tensor lie, in bounds and aligned.
  uint64_t Check(const twin::Instruction& by, uint64_t begin, uint64_t bytes, uint32_t alignment) const {
    if (!memory_) twin::Fail(by, "uses a tensor that was never allocated");
    if (begin + bytes > bytes_)
      twin::Fail(by, "goes beyond its tensor in ", memory_->name, ": byte ", begin + bytes, " of ", bytes_);
    if ((offset_ + begin) % alignment) twin::Fail(by, "starts at byte ", offset_ + begin, " of ", memory_->name, ", which is not aligned to ", alignment);
    return offset_ + begin;
  }
  twin::Memory& memory() const { return *memory_; }
  TPosition position() const { return position_; }
  uint32_t offset() const { return offset_; }
  uint32_t bytes() const { return bytes_; }
  twin::QueueBuffer* buffer() const { return buffer_; }

 private:
  twin::Memory* memory_ = nullptr;
  TPosition position_ = TPosition::GM;
  uint32_t offset_ = 0, bytes_ = 0;
  twin::QueueBuffer* buffer_ = nullptr;
};

template <typename T>
class GlobalTensor {
 public:
  using PrimType = T;
  void SetGlobalBuffer(T* data, uint64_t elements = ~0ull / sizeof(T)) {
    data_ = data;
    size_ = elements;
  }
  GlobalTensor operator[](uint64_t elements) const {
    GlobalTensor part;
    part.SetGlobalBuffer(data_ + elements, size_ - std::min(size_, elements));
    return part;
  }
  // Through the scalar unit's cache, which sees no other core's or DMA's writes: only operands that nobody writes.
  T GetValue(uint64_t i, int line = __builtin_LINE()) const {
    twin::Instruction by("GlobalTensor::GetValue", PIPE_S, line);
    auto [memory, at] = Check(by, i, 1);
    if (!memory->read_only) twin::Fail(by, "reads ", memory->name, ", which the kernel writes: the scalar cache is not coherent");
    T value;
    std::memcpy(&value, memory->data + at, sizeof(T));
    return value;
  }

  std::pair<twin::Memory*, uint64_t> Check(const twin::Instruction& by, uint64_t begin, uint64_t elements) const {
    if (begin + elements > size_) twin::Fail(by, "goes beyond its GlobalTensor: element ", begin + elements, " of ", size_);
    return twin::Global(data_ + begin, by);
  }

 private:
  T* data_ = nullptr;
  uint64_t size_ = 0;
};

template <TPosition position = TPosition::VECCALC>
class TBuf {
 public:
  template <typename T>
  LocalTensor<T> Get() const {
    return {buffer_->memory, position, buffer_->offset, buffer_->bytes, nullptr};
  }
  template <typename T>
  LocalTensor<T> Get(uint32_t elements) const {
    return GetWithOffset<T>(elements, 0);
  }
  template <typename T>
  LocalTensor<T> GetWithOffset(uint32_t elements, uint32_t byte_offset) const {
    if (byte_offset + uint64_t(elements) * sizeof(T) > buffer_->bytes)
      twin::Fail(twin::core().Where(), ": TBuf has ", buffer_->bytes, " bytes, asked for ", byte_offset + elements * sizeof(T));
    return {buffer_->memory, position, buffer_->offset + byte_offset, uint32_t(elements * sizeof(T)), nullptr};
  }

 private:
  friend class TPipe;
  twin::QueueBuffer* buffer_ = nullptr;
};

template <TPosition position, int32_t depth>
class TQue {
  static_assert(depth == 1, "depth 1 is what the API recommends, also with two buffers");
  static_assert(position != TPosition::VECCALC, "a queue at VECCALC orders nothing here; use TBuf and PipeBarrier");

 public:
  template <typename T>
  LocalTensor<T> AllocTensor() {
    twin::QueueBuffer* buffer = Find(twin::QueueBuffer::kFree, "AllocTensor: no buffer is free");
    const twin::Place place = twin::PlaceOf(position);
    if (buffer->free >= 0) {
      twin::Wait(place.free, buffer->free);
      twin::Release(place.free, buffer->free);
      buffer->free = -1;
    }
    buffer->state = twin::QueueBuffer::kAllocated;
    buffer->memory->Poison(buffer->offset, buffer->bytes);
    return Tensor<T>(buffer);
  }
  template <typename T>
  void EnQue(const LocalTensor<T>& tensor) {
    twin::QueueBuffer* buffer = Owned(tensor, twin::QueueBuffer::kAllocated, "EnQue of a tensor that was not allocated");
    const twin::Place place = twin::PlaceOf(position);
    buffer->ready = twin::Reserve(place.ready);
    twin::Set(place.ready, buffer->ready);
    buffer->state = twin::QueueBuffer::kQueued;
    queued_.push_back(buffer);
  }
  template <typename T>
  LocalTensor<T> DeQue() {
    if (queued_.empty()) twin::Fail(twin::core().Where(), ": DeQue of an empty queue: the core hangs");
    twin::QueueBuffer* buffer = queued_.front();
    queued_.pop_front();
    const twin::Place place = twin::PlaceOf(position);
    twin::Wait(place.ready, buffer->ready);
    twin::Release(place.ready, buffer->ready);
    buffer->state = twin::QueueBuffer::kTaken;
    return Tensor<T>(buffer);
  }
  template <typename T>
  void FreeTensor(LocalTensor<T>& tensor) {
    twin::QueueBuffer* buffer = tensor.buffer();
    if (!buffer || buffer->state == twin::QueueBuffer::kFree || buffer->state == twin::QueueBuffer::kQueued)
      twin::Fail(twin::core().Where(), ": FreeTensor of a tensor that is not taken");
    const twin::Place place = twin::PlaceOf(position);
    buffer->freed = place.free;
    buffer->free = twin::Reserve(place.free);
    twin::Set(place.free, buffer->free);
    buffer->state = twin::QueueBuffer::kFree;
  }

 private:
  friend class TPipe;
  template <typename T>
  LocalTensor<T> Tensor(twin::QueueBuffer* buffer) const {
    return {buffer->memory, position, buffer->offset, buffer->bytes, buffer};
  }
  twin::QueueBuffer* Find(int state, const char* problem) {
    for (size_t i = 0; i < buffers_.size(); ++i) {
      twin::QueueBuffer* buffer = buffers_[(next_ + i) % buffers_.size()];
      if (buffer->state != state) continue;
      next_ = (next_ + i + 1) % buffers_.size();
      return buffer;
    }
    twin::Fail(twin::core().Where(), ": ", problem);
  }
  template <typename T>
  twin::QueueBuffer* Owned(const LocalTensor<T>& tensor, int state, const char* problem) {
    for (twin::QueueBuffer* buffer : buffers_)
      if (buffer == tensor.buffer() && buffer->state == state) return buffer;
    twin::Fail(twin::core().Where(), ": ", problem);
  }
  std::vector<twin::QueueBuffer*> buffers_;
  std::deque<twin::QueueBuffer*> queued_;
  size_t next_ = 0;
};

class TPipe {
 public:
  TPipe() {
    if (twin::core().has_pipe) twin::Fail(twin::core().Where(), ": a kernel has one TPipe");
    twin::core().has_pipe = true;
  }
  TPipe(const TPipe&) = delete;
  TPipe& operator=(const TPipe&) = delete;

  template <TPosition position, int32_t depth>
  bool InitBuffer(TQue<position, depth>& queue, uint8_t number, uint32_t bytes) {
    for (int i = 0; i < number; ++i) queue.buffers_.push_back(Take(position, bytes));
    return true;
  }
  template <TPosition position>
  bool InitBuffer(TBuf<position>& buffer, uint32_t bytes) {
    buffer.buffer_ = Take(position, bytes);
    return true;
  }
  template <HardEvent event>
  int8_t AllocEventID() {
    return int8_t(twin::Reserve(event));
  }
  template <HardEvent event>
  void ReleaseEventID(int8_t id) {
    twin::Release(event, id);
  }

 private:
  twin::QueueBuffer* Take(TPosition position, uint32_t bytes) {
    twin::Core& self = twin::core();
    twin::Memory* memory = twin::PlaceOf(position).memory;
    uint64_t used = 0;
    for (const twin::QueueBuffer& buffer : self.buffers)
      if (buffer.memory == memory) used = std::max(used, uint64_t(buffer.offset) + buffer.bytes);
    const uint32_t unit = std::max(memory->alignment, twin::kBlock);
    const uint64_t start = (used + unit - 1) / unit * unit, rounded = (uint64_t(bytes) + 31) / 32 * 32;
    if (start + rounded > memory->size)
      twin::Fail(self.Where(), ": InitBuffer of ", bytes, " bytes overflows ", memory->name, ": ", start + rounded, " of ", memory->size);
    if (self.buffers.size() == 64) twin::Fail(self.Where(), ": a TPipe has at most 64 buffers");
    self.buffers.push_back({memory, uint32_t(start), uint32_t(rounded)});
    return &self.buffers.back();
  }
};

template <HardEvent event>
void SetFlag(int32_t id) {
  twin::Set(event, id);
}
template <HardEvent event>
void WaitFlag(int32_t id) {
  twin::Wait(event, id);
}

template <pipe_t pipe>
void PipeBarrier(int line = __builtin_LINE()) {
  static_assert(pipe != PIPE_S, "PipeBarrier<PIPE_S> is illegal: the scalar unit runs in order");
  twin::Core& self = twin::core();
  if (line == self.machine->skipped_barrier) return;
  if constexpr (pipe == PIPE_ALL) {
    for (int other = 0; other < twin::kPipes; ++other) twin::Receive(PIPE_S, twin::SignalOf(other));
  } else {
    const int own = twin::Index(pipe);
    self.clock[own][self.Agent(own)] = self.issued[own];
  }
}

inline int64_t GetBlockNum() { return twin::core().machine->groups; }
inline int64_t GetSubBlockNum() { return twin::core().machine->subs; }
inline int64_t GetSubBlockIdx() { return twin::core().sub; }
inline int64_t GetBlockIdx() {
  const twin::Core& self = twin::core();
  return self.cube ? self.group : self.group * self.machine->subs + self.sub;
}

// Mode 2: a cube core and its two vector cores. The cube's flag reaches both; the cube waits for both.
template <uint8_t mode, pipe_t pipe>
void CrossCoreSetFlag(uint16_t id) {
  static_assert(mode == 2, "the twin offers mode 2");
  twin::Core& self = twin::core();
  if (id >= twin::kCrossFlags) twin::Fail(self.Where(), ": cross-core flag ", id, "; flags are 0 to 10");
  const twin::Signal signal = twin::SignalOf(twin::Index(pipe));
  auto send = [&](std::deque<twin::Signal>& queue) {
    queue.push_back(signal);
    if (queue.size() > twin::kCrossMax) twin::Fail(self.Where(), ": cross-core flag ", id, " is set more than 15 times without a wait");
  };
  if (self.cube) {
    for (twin::Core& other : self.machine->cores)
      if (!other.cube && other.group == self.group) send(self.machine->to_core[other.index][id]);
  } else {
    send(self.machine->from_core[self.index][id]);
  }
}

template <uint8_t mode, pipe_t pipe = PIPE_S>
void CrossCoreWaitFlag(uint16_t id) {
  static_assert(mode == 2, "the twin offers mode 2");
  static_assert(pipe == PIPE_S, "the twin offers waits of the scalar unit, which holds back every pipe");
  twin::Core& self = twin::core();
  if (id >= twin::kCrossFlags) twin::Fail(self.Where(), ": cross-core flag ", id, "; flags are 0 to 10");
  std::vector<std::deque<twin::Signal>*> queues;
  if (self.cube) {
    for (twin::Core& other : self.machine->cores)
      if (!other.cube && other.group == self.group) queues.push_back(&self.machine->from_core[other.index][id]);
  } else {
    queues.push_back(&self.machine->to_core[self.index][id]);
  }
  self.machine->Block(self, "cross-core flag " + std::to_string(id), [queues] {
    return std::all_of(queues.begin(), queues.end(), [](const auto* queue) { return !queue->empty(); });
  });
  for (auto* queue : queues) {
    twin::Receive(PIPE_S, queue->front());
    queue->pop_front();
  }
}

}  // namespace AscendC
