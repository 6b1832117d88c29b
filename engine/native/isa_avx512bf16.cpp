#define HEADRACE_ISA avx512bf16
#include "isa.h"
