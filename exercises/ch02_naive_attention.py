"""Chapter 02: how the answers on naive attention, its bytes, its memory and its three kernels are judged."""

from exercises.naive_bytes import PASS_BYTES
from exercises.naive_causal import CAUSAL
from exercises.naive_memory import LONGEST
from exercises.naive_output import OUTPUT
from exercises.naive_scores import SCORES
from exercises.naive_softmax import ROW_SOFTMAX

EXERCISES = (PASS_BYTES, LONGEST, CAUSAL, SCORES, ROW_SOFTMAX, OUTPUT)
