"""Arithmetic on tensors and over ranks, and the numbers that storage formats are made of, without
imports.

Formats: OCP Microscaling Formats (MX) 1.0, section 5; scales: calculate_qparams and generate_gparam
in compressed_tensors/quantization/utils/helpers.py.
"""

# The largest numbers of the formats; beyond them values saturate.
E2M1_MAX = 6.0
E4M3_MAX = 448.0
# MX scales are exponents with a bias, 255 where a value is not finite. What is added to a float32's
# bits before its exponent is taken: from 1.75 times a power of two on, a maximum is rounded up.
E8M0_BIAS = 127
E8M0_NAN = 0xFF
MX_ROUND_UP = 1 << 21
# Values that share a scale.
NVFP4_GROUP = 16
MX_GROUP = 32
# The global scale maps the largest block scale of NVFP4 to the largest e4m3 number.
GLOBAL_SCALE_NUMERATOR = E4M3_MAX * E2M1_MAX
# The value in place of a zero scale: the storage dtype's step at one. The code is that of 0.125.
FLOAT32_EPS = 2.0**-23
E4M3_EPS = 0.125
E4M3_EPS_CODE = 0x20
# The word size of packed integers, in bits.
INT32_BITS = 32
