// Stands in for CANN's kernel_operator.h when a kernel source is compiled for the CPU twin.
#pragma once

#include "cube.h"
