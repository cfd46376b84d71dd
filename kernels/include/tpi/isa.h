// Which instruction set this translation unit is compiled for. The build compiles every kernel file once per level:
// 0 portable, 1 wide (AVX2 or NEON), 2 widest (AVX-512), and passes TPI_LEVEL with the matching compiler flags.
#pragma once

#if TPI_LEVEL == 0
#define TPI_NS portable
#define TPI_EXPORT(name) extern "C" int tpi_##name##__portable
#elif TPI_LEVEL == 1
#define TPI_NS wide
#define TPI_EXPORT(name) extern "C" int tpi_##name##__wide
#if defined(__x86_64__)
#define TPI_ISA_AVX2
#else
#define TPI_ISA_NEON
#endif
#elif TPI_LEVEL == 2
#define TPI_NS widest
#define TPI_EXPORT(name) extern "C" int tpi_##name##__widest
#define TPI_ISA_AVX512
#else
#error "TPI_LEVEL must be 0, 1 or 2"
#endif
