"""Chapter 03: safe, one-pass, merged and streamed softmax."""

from exercises.softmax_kernels import LOG_SUM_EXP, ONLINE_KERNEL
from exercises.softmax_merging import MERGE, STREAMING
from exercises.softmax_passes import SAFE_SOFTMAX, STATISTICS

EXERCISES = (SAFE_SOFTMAX, STATISTICS, MERGE, STREAMING, ONLINE_KERNEL, LOG_SUM_EXP)
