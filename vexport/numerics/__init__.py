"""Arithmetic on tensors and over ranks.

This file has the constants of number formats and imports nothing.
Formats: OCP Microscaling Formats (MX) 1.0, section 5. Scales: calculate_qparams and generate_gparam
in compressed_tensors/quantization/utils/helpers.py.
"""

# Largest values of the formats. Larger values saturate.
E2M1_MAX = 6.0
E4M3_MAX = 448.0
# An MX scale is stored as an exponent plus E8M0_BIAS. The code 255 (E8M0_NAN) means that a value
# was not finite. MX_ROUND_UP is added to the bits of a float32 maximum before its exponent is read.
# A maximum of at least 1.75 times a power of two is thereby rounded up to the next power.
E8M0_BIAS = 127
E8M0_NAN = 0xFF
MX_ROUND_UP = 1 << 21
# Number of values that share a scale.
NVFP4_GROUP = 16
MX_GROUP = 32
# The global scale maps the largest block scale of NVFP4 to the largest e4m3 number.
GLOBAL_SCALE_NUMERATOR = E4M3_MAX * E2M1_MAX
# Replacement for a zero scale: the distance from 1 to the next larger number of the storage dtype.
# E4M3_EPS_CODE is the e4m3 code of 0.125.
FLOAT32_EPS = 2.0**-23
E4M3_EPS = 0.125
E4M3_EPS_CODE = 0x20
# Word size of packed integers, in bits.
INT32_BITS = 32
