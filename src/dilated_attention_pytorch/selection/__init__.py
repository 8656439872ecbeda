"""Which segments for which call: candidates, what each costs on this machine, and the best that fits the budget."""

from .boundaries import find_breaks, snap_boundaries
from .candidates import candidates
from .config import SegmentSelectionConfig
from .hardware import Hardware, free_memory, read_hardware
from .profile import Profile, Rates, load_profile, profile_path, store_profile
from .selector import Choice, DynamicSegmentSelector, Estimate
from .workload import Workload

__all__ = [
    "Choice", "DynamicSegmentSelector", "Estimate", "Hardware", "Profile", "Rates", "SegmentSelectionConfig",
    "Workload", "candidates", "find_breaks", "free_memory", "load_profile", "profile_path", "read_hardware",
    "snap_boundaries", "store_profile",
]  # fmt: skip
