"""Imported in place of torch: as on a kernel that does not let a process write over its first environment."""

from clusterd.agent.host import processes

processes.claim_environment = lambda _name, _value: False
