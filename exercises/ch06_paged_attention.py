"""Chapter 06: how paging is judged, from counting waste to a kernel that reads its keys from pages anywhere."""

from exercises.page_allocator import ALLOCATOR
from exercises.page_kernels import APPEND, DECODE
from exercises.page_sharing import SHARING
from exercises.page_slots import SLOTS
from exercises.page_waste import WASTE

EXERCISES = (WASTE, ALLOCATOR, SLOTS, APPEND, DECODE, SHARING)
