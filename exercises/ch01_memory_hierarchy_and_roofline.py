"""Chapter 01: how the answers on bytes, FLOPs, first kernels and the roofline are judged."""

from exercises.roofline_balance import BALANCE
from exercises.roofline_chain import TURNING_POINT
from exercises.roofline_costs import BYTES_AND_FLOPS
from exercises.row_sum import ROW_SUM
from exercises.scale_add_relu import SCALE_ADD_RELU
from exercises.vector_add import VECTOR_ADD

EXERCISES = (BYTES_AND_FLOPS, BALANCE, VECTOR_ADD, ROW_SUM, SCALE_ADD_RELU, TURNING_POINT)
