// The twin against what is documented of the hardware, and faults planted in small kernels. Prints one line per failure.
#include <cstdio>
#include <functional>

#include "launch.h"

using namespace AscendC;
using twin::Buffer;
using twin::KernelType;

namespace {

int checked = 0, failed = 0;

void Expect(const char* what, bool holds, const std::string& detail = "") {
  ++checked;
  if (holds) return;
  ++failed;
  std::printf("FAILED %s %s\n", what, detail.c_str());
}

float in[4096], out[4096], extra[4096];
constexpr float kInf = INFINITY;

std::vector<Buffer> Operands() {
  return {{Buffer::kInput, "in", in, sizeof in}, {Buffer::kInOut, "out", out, sizeof out}, {Buffer::kWorkspace, "workspace", extra, sizeof extra}};
}

constexpr auto kVector = KernelType::kAivOnly;
constexpr auto kMix = KernelType::kMixAic12;

twin::Counts Run(KernelType type, const std::function<void()>& kernel) {
  return twin::Launch(type, {1, 1, 0}, Operands(), kernel);
}

// A fault in whatever order the cores run; in one of four orders at the latest it is the expected one.
void ExpectFault(const char* what, const char* part, KernelType type, const std::function<void()>& kernel, int blocks = 1) {
  std::string messages;
  bool always = true, expected = false;
  for (uint64_t seed = 0; seed < (type == kMix ? 4 : 1); ++seed) {
    std::string message = "no fault";
    try {
      twin::Launch(type, {blocks, seed, 0}, Operands(), kernel);
      always = false;
    } catch (const twin::Fault& fault) {
      message = fault.what();
    }
    expected = expected || message.find(part) != std::string::npos;
    messages += " | " + message;
  }
  Expect(what, always && expected, messages);
}

GlobalTensor<float> Global(float* data, uint64_t size = 4096) {
  GlobalTensor<float> tensor;
  tensor.SetGlobalBuffer(data, size);
  return tensor;
}

// UB with one region, all ordering by hand.
struct Ub {
  TPipe pipe;
  TBuf<TPosition::VECCALC> buffer;
  LocalTensor<float> all;
  explicit Ub(uint32_t bytes = 64 * 1024) {
    pipe.InitBuffer(buffer, bytes);
    all = buffer.Get<float>();
  }
  void Load(uint32_t elements) {
    DataCopy(all, Global(in), elements);
    SetFlag<HardEvent::MTE2_V>(0);
    WaitFlag<HardEvent::MTE2_V>(0);
  }
  void Store(uint32_t from, uint32_t elements) {
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
    DataCopy(Global(out), all[from], elements);
  }
};

constexpr uint32_t kTo = 4096;  // where results go in Ub

// op(destination, source) on the first `n` inputs.
void Vector(uint32_t n, uint32_t results, const std::function<void(LocalTensor<float>, LocalTensor<float>)>& op) {
  Run(kVector, [&] {
    Ub ub;
    ub.Load(n);
    op(ub.all[kTo], ub.all);
    ub.Store(kTo, results);
  });
}

bool Same(float a, float b) { return twin::Bits(a) == twin::Bits(b); }

void SpecialValues() {
  const float nan = NAN, tiny = 1e-40f;
  const float values[] = {nan, kInf, -kInf, 0.0f, -0.0f, 1.0f, -1.0f, tiny};
  std::copy(std::begin(values), std::end(values), in);
  Vector(8, 8, [](auto to, auto from) { Exp(to, from, 8); });
  Expect("exp", std::isnan(out[0]) && out[1] == kInf && Same(out[2], 0.0f) && out[3] == 1.0f && out[7] == 1.0f);
  Vector(8, 8, [](auto to, auto from) { Ln(to, from, 8); });
  Expect("ln", out[3] == -kInf && out[4] == -kInf && std::isnan(out[6]) && out[7] == float(std::log(double(tiny))));
  Vector(8, 8, [](auto to, auto from) { Sqrt(to, from, 8); });
  Expect("sqrt", Same(out[4], -0.0f) && std::isnan(out[6]));
  Vector(8, 8, [](auto to, auto from) { Muls(to, from, 0.5f, 8); });
  Expect("subnormals are kept", Same(out[7], 0.5f * tiny) && out[7] != 0);
  Vector(8, 8, [](auto to, auto from) { Maxs(to, from, 0.0f, 8); });
  Expect("max: NaN wins, +0 above -0", std::isnan(out[0]) && Same(out[4], 0.0f) && Same(out[3], 0.0f));
  Vector(8, 8, [](auto to, auto from) { Mins(to, from, 0.0f, 8); });
  Expect("min: NaN wins, -0 below +0", std::isnan(out[0]) && Same(out[4], -0.0f) && Same(out[3], 0.0f));
  std::fill_n(in + 8, 8, 0.0f);
  Vector(16, 8, [](auto to, auto from) { Div(to, from, from[8], 8); });
  Expect("division by zero", out[5] == kInf && std::isnan(out[3]));
}

void Casts() {
  bool in_range = true, identical = true;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    if ((bits & 0x7f80) != 0x7f80) identical &= twin::Rounded<bfloat16_t>(twin::Value(bfloat16_t{uint16_t(bits)}), in_range).bits == bits;
    if ((bits & 0x7c00) != 0x7c00) identical &= twin::Rounded<half>(twin::Value(half{uint16_t(bits)}), in_range).bits == bits;
  }
  Expect("every 16-bit value survives a widening and a narrowing", identical && in_range);
  auto bf16 = [&](float x) { return twin::Rounded<bfloat16_t>(x, in_range).bits; };
  auto f16 = [&](float x) { return twin::Rounded<half>(x, in_range).bits; };
  Expect("bf16 ties to even", bf16(twin::FromBits(0x3f808000)) == 0x3f80 && bf16(twin::FromBits(0x3f818000)) == 0x3f82);
  Expect("fp16 ties to even", f16(1.0f + 0x1p-11f) == 0x3c00 && f16(1.0f + 3 * 0x1p-11f) == 0x3c02 && f16(0x1p-25f) == 0 &&
                                  f16(3 * 0x1p-25f) == 2 && f16(65519.0f) == 0x7bff && f16(0x1p-14f - 0x1p-26f) == 0x0400);
  in[0] = 1e6f;
  auto narrow = [](RoundMode mode) {
    return [mode] {
      Ub ub;
      ub.Load(64);
      Cast(ub.all[kTo].ReinterpretCast<half>(), ub.all, mode, 64);
    };
  };
  ExpectFault("overflow depends on the saturation mode", "CTRL[48]", kVector, narrow(RoundMode::CAST_RINT));
  ExpectFault("narrowing names a rounding mode", "CAST_RINT", kVector, narrow(RoundMode::CAST_NONE));
}

void Reductions() {
  std::mt19937 random(1);
  for (float& x : in) x = std::ldexp(float(random()) * 0x1p-32f - 0.5f, int(random() % 40));
  auto pairs = [](const float* x, int n) {
    std::vector<float> y(x, x + n);
    for (; n > 1; n /= 2)
      for (int i = 0; i < n / 2; ++i) y[i] = y[2 * i] + y[2 * i + 1];
    return y[0];
  };
  float chain = 0;
  for (int i = 0; i < 64; ++i) chain += in[i];
  Expect("these values tell a tree from a chain", !Same(chain, pairs(in, 64)));
  Vector(512, 64, [](auto to, auto from) { BlockReduceSum(to, from, 8, 64, 1, 1, 8); });
  bool equal = true;
  for (int i = 0; i < 64; ++i) equal &= Same(out[i], pairs(in + 8 * i, 8));
  Expect("BlockReduceSum: adjacent pairs in each block", equal);
  Vector(512, 8, [](auto to, auto from) {
    BlockReduceSum(to[64], from, 8, 64, 1, 1, 8);
    PipeBarrier<PIPE_V>();
    BlockReduceSum(to, to[64], 1, 64, 1, 1, 8);
  });
  equal = true;
  for (int i = 0; i < 8; ++i) equal &= Same(out[i], pairs(in + 64 * i, 64));
  Expect("BlockReduceSum twice: the tree over 64", equal);
  Vector(512, 8, [](auto to, auto from) { WholeReduceSum(to, from, 64, 8, 1, 1, 8); });
  equal = true;
  for (int i = 0; i < 8; ++i) equal &= Same(out[i], pairs(in + 64 * i, 64));
  Expect("WholeReduceSum: the same tree", equal);
  Vector(128, 64, [](auto to, auto from) { PairReduceSum(to, from, 2, 64, 1, 1, 8); });
  Expect("PairReduceSum", Same(out[0], in[0] + in[1]) && Same(out[63], in[126] + in[127]));
  Vector(64, 64, [](auto to, auto from) { Brcb(to, from, 1, BrcbRepeatParams(1, 8)); });
  Expect("Brcb: a scalar fills a block", out[0] == in[0] && out[7] == in[0] && out[8] == in[1] && out[63] == in[7]);
  in[3] = NAN;
  Vector(64, 8, [](auto to, auto from) { BlockReduceMax(to, from, 1, 64, 1, 1, 8); });
  Expect("BlockReduceMax propagates NaN", std::isnan(out[0]) && !std::isnan(out[1]));
  ExpectFault("repeatTime and mask swapped", "ends inside a group", kVector, [] {
    Ub ub;
    ub.Load(512);
    BlockReduceSum(ub.all[kTo], ub.all, 64, 1, 1, 1, 8);
  });
}

void Copies() {
  for (int i = 0; i < 4096; ++i) in[i] = float(i);
  auto padded = [](DataCopyPadExtParams<float> pad, uint32_t columns) {
    Run(kVector, [=] {
      Ub ub;
      DataCopyPad(ub.all, Global(in), DataCopyExtParams(2, columns * 4, 12, 1, 0), pad);
      SetFlag<HardEvent::MTE2_MTE3>(0);
      WaitFlag<HardEvent::MTE2_MTE3>(0);
      DataCopy(Global(out), ub.all, 8);
      DataCopy(Global(out)[8], ub.all[16], 8);
    });
  };
  padded({true, 1, 2, -5.0f}, 5);
  Expect("DataCopyPad: paddings, gap of 32 B in UB, of bytes in GM", out[0] == -5 && out[1] == 0 && out[5] == 4 && out[6] == -5 && out[9] == 8);
  padded({false, 0, 0, 0.0f}, 5);
  Expect("DataCopyPad without padding fills with the row's first element", out[4] == 4 && out[5] == 0 && out[8] == 8 && out[13] == 8);
  ExpectFault("a padding of no value is undefined", "unwritten", kVector, [] {
    Ub ub;
    DataCopyPad(ub.all, Global(in), DataCopyExtParams(1, 20, 0, 0, 0), DataCopyPadExtParams<float>(false, 0, 1, 0.0f));
    SetFlag<HardEvent::MTE2_MTE3>(0);
    WaitFlag<HardEvent::MTE2_MTE3>(0);
    DataCopy(Global(out), ub.all, 8);
  });
  ExpectFault("a count that is no multiple of 32 bytes", "cuts to a multiple of 32", kVector, [] { Ub().Load(7); });
  ExpectFault("beyond GM", "no operand", kVector, [] {
    Ub ub;
    DataCopy(ub.all, Global(in + 4096, 8), 8);
  });
  ExpectFault("beyond the GlobalTensor", "beyond its GlobalTensor", kVector, [] {
    Ub ub;
    DataCopy(ub.all, Global(in, 4), 8);
  });
  ExpectFault("an input is written", "is an input", kVector, [] {
    Ub ub;
    Duplicate(ub.all, 1.0f, 8);
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
    DataCopy(Global(in), ub.all, 8);
  });
  ExpectFault("unaligned in UB", "not aligned", kVector, [] {
    Ub ub;
    DataCopy(ub.all[1], Global(in), 8);
  });
  ExpectFault("the scalar cache is not coherent", "not coherent", kVector, [] { Global(extra).GetValue(0); });
  ExpectFault("workspace that nobody wrote", "unwritten", kVector, [] {
    Ub ub;
    DataCopy(ub.all, Global(extra), 8);
  });
}

void Planted() {
  auto sum = [](bool barrier, bool loaded, bool stored) {
    return [=] {
      Ub ub;
      DataCopy(ub.all, Global(in), 64);
      SetFlag<HardEvent::MTE2_V>(0);
      if (loaded) WaitFlag<HardEvent::MTE2_V>(0);
      Adds(ub.all[64], ub.all, 1.0f, 64);
      if (barrier) PipeBarrier<PIPE_V>();
      Adds(ub.all[128], ub.all[64], 1.0f, 64);
      SetFlag<HardEvent::V_MTE3>(1);
      if (stored) WaitFlag<HardEvent::V_MTE3>(1);
      DataCopy(Global(out), ub.all[128], 64);
    };
  };
  Run(kVector, sum(true, true, true));
  ExpectFault("missing barrier", "without PipeBarrier<PIPE_V>", kVector, sum(false, true, true));
  ExpectFault("missing MTE2_V", "Set/WaitFlag MTE2_V", kVector, sum(true, false, true));
  ExpectFault("missing V_MTE3", "Set/WaitFlag V_MTE3", kVector, sum(true, true, false));
  ExpectFault("a buffer loaded again while it is read", "Set/WaitFlag V_MTE2", kVector, [] {
    Ub ub;
    ub.Load(64);
    Adds(ub.all[64], ub.all, 1.0f, 64);
    DataCopy(ub.all, Global(in), 64);
  });
  ExpectFault("a store overwritten by another", "PipeBarrier<PIPE_MTE3>", kVector, [] {
    Ub ub;
    Duplicate(ub.all, 1.0f, 64);
    ub.Store(0, 64);
    DataCopy(Global(out), ub.all, 64);
  });
  ExpectFault("a scalar write read by the vector unit", "Set/WaitFlag S_V", kVector, [] {
    Ub ub;
    ub.all.SetValue(0, 1.0f);
    Adds(ub.all[8], ub.all, 1.0f, 1);
  });
  ExpectFault("unpaired flag", "never waited for", kVector, [] { SetFlag<HardEvent::MTE2_V>(3); });
  ExpectFault("wait without set", "nobody has set", kVector, [] { WaitFlag<HardEvent::MTE2_V>(3); });
  ExpectFault("a flag set twice", "set twice", kVector, [] {
    SetFlag<HardEvent::MTE2_V>(3);
    SetFlag<HardEvent::MTE2_V>(3);
  });
  ExpectFault("event id 8", "ids are 0 to 7", kVector, [] { SetFlag<HardEvent::MTE2_V>(8); });
  ExpectFault("UB overflows", "overflows UB", kVector, [] { Ub ub(185 * 1024); });
  ExpectFault("a tensor overflows", "beyond its tensor", kVector, [] {
    Ub ub(256);
    Duplicate(ub.all, 1.0f, 65);
  });
  ExpectFault("unwritten UB", "unwritten memory", kVector, [] {
    Ub ub;
    Adds(ub.all, ub.all, 1.0f, 8);
  });
  ExpectFault("partial overlap", "overlaps", kVector, [] {
    Ub ub;
    Duplicate(ub.all, 1.0f, 128);
    PipeBarrier<PIPE_V>();
    Adds(ub.all[8], ub.all, 1.0f, 64);
  });
  ExpectFault("a repeat that depends on the one before", "not ordered", kVector, [] {
    Ub ub;
    Duplicate(ub.all, 1.0f, 256);
    PipeBarrier<PIPE_V>();
    Add(ub.all, ub.all, ub.all[64], 64, 2, BinaryRepeatParams(1, 1, 1, 0, 0, 8));
  });
  ExpectFault("mask of 65 lanes", "outside 1 to 64", kVector, [] {
    Ub ub;
    Duplicate(ub.all, 1.0f, 256);
    PipeBarrier<PIPE_V>();
    Add(ub.all, ub.all, ub.all, 65, 1, BinaryRepeatParams());
  });
  ExpectFault("nine queue buffers", "event ids", kVector, [] {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 9, 32);
    for (int i = 0; i < 9; ++i) queue.EnQue(queue.AllocTensor<float>());
  });
  ExpectFault("a queue's tensor is kept", "not freed", kVector, [] {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 1, 32);
    queue.AllocTensor<float>();
  });
  ExpectFault("a freed tensor is read", "unwritten memory", kVector, [] {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(queue, 1, 256);
    pipe.InitBuffer(buffer, 256);
    LocalTensor<float> tensor = queue.AllocTensor<float>();
    DataCopy(tensor, Global(in), 64);
    queue.EnQue(tensor);
    tensor = queue.DeQue<float>();
    queue.FreeTensor(tensor);
    queue.AllocTensor<float>();
    Adds(buffer.Get<float>(), tensor, 1.0f, 64);
  });
  ExpectFault("two blocks write the same output", "cross-core flag", kVector, [] {
    Ub ub;
    Duplicate(ub.all, 1.0f, 8);
    ub.Store(0, 8);
  }, 2);
}

// 16-bit operands of one product in L1: A [m, k] and B [n, k], from float values that bf16 holds.
struct Cube {
  TPipe pipe;
  TQue<TPosition::A1, 1> a1;
  TQue<TPosition::B1, 1> b1;
  TQue<TPosition::A2, 1> a2;
  TQue<TPosition::B2, 1> b2;
  TQue<TPosition::CO1, 1> c;
  Cube() {
    pipe.InitBuffer(a1, 1, 4096);
    pipe.InitBuffer(b1, 1, 4096);
    pipe.InitBuffer(a2, 1, 4096);
    pipe.InitBuffer(b2, 1, 4096);
    pipe.InitBuffer(c, 1, 4096);
  }
  // 16 x 16 products along k of float32, `rows` rows of A; stored columns x rows.
  void Product(uint32_t rows, uint32_t k, uint32_t stored, uint16_t m = 16) {
    LocalTensor<float> a = a1.AllocTensor<float>(), b = b1.AllocTensor<float>();
    DataCopy(a, Global(in), Nd2NzParams(1, rows, k, 0, k, 16, 1, 0));
    DataCopy(b, Global(in + 1024), Nd2NzParams(1, 16, k, 0, k, 16, 1, 0));
    a1.EnQue(a);
    b1.EnQue(b);
    a = a1.DeQue<float>();
    b = b1.DeQue<float>();
    LocalTensor<float> left = a2.AllocTensor<float>(), right = b2.AllocTensor<float>(), sums = c.AllocTensor<float>();
    const uint8_t fractals = (k + 7) / 8;
    LoadData(left, a, LoadData2DParams(0, fractals, 1, 0, 0, false, 0));
    LoadData(right, b, LoadData2DParams(0, fractals, 1, 0, 0, false, 0));
    a1.FreeTensor(a);
    b1.FreeTensor(b);
    a2.EnQue(left);
    b2.EnQue(right);
    left = a2.DeQue<float>();
    right = b2.DeQue<float>();
    Mmad(sums, left, right, MmadParams(m, 16, k, 0, false, true));
    a2.FreeTensor(left);
    b2.FreeTensor(right);
    c.EnQue(sums);
    sums = c.DeQue<float>();
    Fixpipe<float, float, CFG_ROW_MAJOR>(Global(out), sums, FixpipeParamsV220(16, stored, 16, 16, false));
    c.FreeTensor(sums);
  }
};

void Products() {
  for (int i = 0; i < 4096; ++i) in[i] = std::ldexp(1.0f + i % 5, i * 7 % 23) * (i % 3 ? 1 : -1);
  const twin::Counts counts = Run(kMix, [] {
    if ASCEND_IS_AIC Cube().Product(3, 20, 3);
  });
  bool equal = true;
  for (int m = 0; m < 3; ++m)
    for (int n = 0; n < 16; ++n) {
      float sum = 0;
      for (int k = 0; k < 24; k += 8) {
        float p[8];
        for (int i = 0; i < 8; ++i) p[i] = k + i < 20 ? in[m * 20 + k + i] * in[1024 + n * 20 + k + i] : 0.0f;
        sum += ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
      }
      equal &= Same(out[m * 16 + n], sum);
    }
  Expect("Mmad: the declared order, a short last group padded by zeros", equal);
  Expect("cube cycles of float32: two a block of k", counts.busy[PIPE_M] == 6);
  ExpectFault("padding rows are not stored", "unwritten memory", kMix, [] {
    if ASCEND_IS_AIC Cube().Product(3, 16, 4);
  });
  ExpectFault("m = 1", "pad m to 16", kMix, [] {
    if ASCEND_IS_AIC Cube().Product(1, 16, 1, 1);
  });
  ExpectFault("a vector instruction on the cube core", "does not exist", kMix, [] {
    if ASCEND_IS_AIC Ub();
  });
  ExpectFault("small products that continue need a barrier", "PipeBarrier<PIPE_M>", kMix, [] {
    if ASCEND_IS_AIV return;
    Cube cube;
    LocalTensor<float> left = cube.a2.AllocTensor<float>(), right = cube.b2.AllocTensor<float>(), sums = cube.c.AllocTensor<float>();
    Mmad(sums, left, right, MmadParams(16, 16, 16, 0, false, true));
    Mmad(sums, left, right, MmadParams(16, 16, 16, 0, false, false));
  });
  ExpectFault("Fixpipe before the product has finished", "Set/WaitFlag M_FIX", kMix, [] {
    if ASCEND_IS_AIV return;
    Cube cube;
    LocalTensor<float> left = cube.a2.AllocTensor<float>(), right = cube.b2.AllocTensor<float>(), sums = cube.c.AllocTensor<float>();
    Mmad(sums, left, right, MmadParams(16, 16, 16, 0, false, true));
    Fixpipe<float, float, CFG_ROW_MAJOR>(Global(out), sums, FixpipeParamsV220(16, 16, 16, 16, false));
  });
  ExpectFault("L0C overflows", "overflows L0C", kMix, [] {
    if ASCEND_IS_AIV return;
    TPipe pipe;
    TQue<TPosition::CO1, 1> queue;
    pipe.InitBuffer(queue, 2, 65 * 1024);
  });
}

// The cube writes a workspace, the vector cores read it.
void CrossCore() {
  for (int i = 0; i < 4096; ++i) in[i] = float(i % 8);
  auto exchange = [](bool set, bool wait, int extra_sets) {
    return [=] {
      if ASCEND_IS_AIC {
        Cube cube;
        LocalTensor<float> sums = cube.c.AllocTensor<float>(), left = cube.a2.AllocTensor<float>(), right = cube.b2.AllocTensor<float>();
        LocalTensor<float> a = cube.a1.AllocTensor<float>();
        LocalTensor<float> b = cube.b1.AllocTensor<float>();
        DataCopy(a, Global(in), Nd2NzParams(1, 16, 8, 0, 8, 16, 1, 0));
        DataCopy(b, Global(in), Nd2NzParams(1, 16, 8, 0, 8, 16, 1, 0));
        cube.a1.EnQue(a);
        a = cube.a1.DeQue<float>();
        cube.b1.EnQue(b);
        b = cube.b1.DeQue<float>();
        LoadData(left, a, LoadData2DParams(0, 1, 1, 0, 0, false, 0));
        LoadData(right, b, LoadData2DParams(0, 1, 1, 0, 0, false, 0));
        cube.a1.FreeTensor(a);
        cube.b1.FreeTensor(b);
        cube.a2.EnQue(left);
        left = cube.a2.DeQue<float>();
        cube.b2.EnQue(right);
        right = cube.b2.DeQue<float>();
        Mmad(sums, left, right, MmadParams(16, 16, 8, 0, false, true));
        cube.a2.FreeTensor(left);
        cube.b2.FreeTensor(right);
        cube.c.EnQue(sums);
        sums = cube.c.DeQue<float>();
        Fixpipe<float, float, CFG_ROW_MAJOR>(Global(extra), sums, FixpipeParamsV220(16, 16, 16, 16, false));
        cube.c.FreeTensor(sums);
        for (int i = 0; i < set + extra_sets; ++i) CrossCoreSetFlag<2, PIPE_FIX>(4);
      }
      if ASCEND_IS_AIV {
        if (wait) CrossCoreWaitFlag<2>(4);
        Ub ub;
        DataCopy(ub.all, Global(extra)[GetSubBlockIdx() * 128], 128);
        SetFlag<HardEvent::MTE2_MTE3>(0);
        WaitFlag<HardEvent::MTE2_MTE3>(0);
        DataCopy(Global(out)[GetBlockIdx() * 128], ub.all, 128);
      }
    };
  };
  Run(kMix, exchange(true, true, 0));
  Expect("AIC to AIV through GM", out[0] == 140 && out[255] == 140);
  ExpectFault("missing cross-core flag", "without a cross-core flag", kMix, exchange(false, false, 0));
  ExpectFault("a cross-core flag that nobody waits for", "never waited for", kMix, exchange(true, true, 1));
  ExpectFault("sixteen sets", "more than 15 times", kMix, exchange(true, true, 16));
  ExpectFault("deadlock", "deadlock", kMix, exchange(false, true, 0));
}

void Counted() {
  for (int i = 0; i < 4096; ++i) in[i] = 1;
  const twin::Counts counts = Run(kVector, [] {
    Ub ub;
    ub.Load(1024);
    Adds(ub.all[1024], ub.all, 1.0f, 1024);  // 16 cycles
    PipeBarrier<PIPE_V>();
    Exp(ub.all[2048], ub.all[1024], 1024);  // 32
    PipeBarrier<PIPE_V>();
    WholeReduceSum(ub.all[kTo], ub.all[2048], 64, 16, 1, 1, 8);  // 16 * 7
    ub.Store(kTo, 16);
  });
  Expect("bytes", counts.gm_to_ub == 4096 && counts.ub_to_gm == 64);
  Expect("vector cycles", counts.busy[PIPE_V] == 16 + 32 + 112);
  Expect("critical path: load, compute, store one after another", std::abs(counts.critical - (4096 / twin::kGmRead + 160 + 64 / twin::kUbToGm)) < 1e-9);
}

}  // namespace

int main() {
  SpecialValues();
  Casts();
  Reductions();
  Copies();
  Planted();
  Products();
  CrossCore();
  Counted();
  std::printf("%d checked, %d failed\n", checked, failed);
  return failed != 0;
}
