"""Arithmetic on tensors and over ranks, and the constants of number formats, without imports.

Formats: OCP Microscaling Formats (MX) 1.0, section 5. Scales: calculate_qparams and generate_gparam
in compressed_tensors/quantization/utils/helpers.py.
"""

# Largest values of the formats. Larger values saturate.
E2M1_MAX = 6.0
E4M3_MAX = 448.0
# MX scales are exponents with a bias; the code 255 stands for values that are not finite.
# MX_ROUND_UP is added to the bits of a float32 before its exponent is taken: maxima from 1.75 times
# a power of two on are rounded up.
E8M0_BIAS = 127
E8M0_NAN = 0xFF
MX_ROUND_UP = 1 << 21
# Number of values that share a scale.
NVFP4_GROUP = 16
MX_GROUP = 32
# The global scale maps the largest block scale of NVFP4 to the largest e4m3 number.
GLOBAL_SCALE_NUMERATOR = E4M3_MAX * E2M1_MAX
# Replacement for a zero scale: the step of the storage dtype at 1. E4M3_EPS_CODE is the e4m3 code
# of 0.125.
FLOAT32_EPS = 2.0**-23
E4M3_EPS = 0.125
E4M3_EPS_CODE = 0x20
# Word size of packed integers, in bits.
INT32_BITS = 32
