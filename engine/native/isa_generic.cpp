#define HEADRACE_ISA generic
#include "isa.h"
