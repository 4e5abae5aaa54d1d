"""In which order waiting works are offered to engines: across classes, then across tenants."""

from policies.ordering.queues import OVERDUE_SHARE, Backlog, backlogs, entitled, late_by_class, pressed, urgent
from policies.ordering.tenants import TenantCounters

__all__ = ["OVERDUE_SHARE", "Backlog", "TenantCounters", "backlogs", "entitled", "late_by_class", "pressed", "urgent"]
