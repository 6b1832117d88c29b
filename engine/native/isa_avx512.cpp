#define HEADRACE_ISA avx512
#include "isa.h"
