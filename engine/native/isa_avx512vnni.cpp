#define HEADRACE_ISA avx512vnni
#include "isa.h"
