"""Chapter 07: how shared KV heads are judged, from the head map to a decode kernel that reads each key once."""

from exercises.grouped_deployment import DEPLOYMENT
from exercises.grouped_head_map import HEAD_MAP
from exercises.grouped_in_pytorch import SHARED
from exercises.grouped_intensity import INTENSITY
from exercises.grouped_kernel import KERNEL
from exercises.grouped_pooling import POOL

EXERCISES = (HEAD_MAP, INTENSITY, POOL, SHARED, KERNEL, DEPLOYMENT)
