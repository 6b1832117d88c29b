#define HEADRACE_ISA avx2
#include "isa.h"
