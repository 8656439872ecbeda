"""Which segments for which call: candidates, what each costs on this machine, and the best that fits the budget."""

from dilated_attention_pytorch.estimate.workload import Workload
from dilated_attention_pytorch.patterns.boundaries import find_breaks, snap_boundaries

from .config import SegmentSelectionConfig
from .hardware import Hardware, read_hardware
from .profile import Profile, Rates
from .selector import Choice, DynamicSegmentSelector, Estimate

__all__ = [
    "Choice",
    "DynamicSegmentSelector",
    "Estimate",
    "Hardware",
    "Profile",
    "Rates",
    "SegmentSelectionConfig",
    "Workload",
    "find_breaks",
    "read_hardware",
    "snap_boundaries",
]
