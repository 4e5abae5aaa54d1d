"""In which order waiting works are offered to engines: across classes, then across tenants."""

from policies.ordering.queues import Lane, entitled, patient_lanes, urgent
from policies.ordering.tenants import TenantCounters

__all__ = ["Lane", "TenantCounters", "entitled", "patient_lanes", "urgent"]
