"""Criteria by which jobs are before others in the queue; quick to import."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Criterion(StrEnum):
    """Criterion that puts a job before another one, most significant first, each with a sentence about that job."""

    sentence: str

    def __new__(cls, value: str, sentence: str) -> Self:
        made = str.__new__(cls, value)
        made._value_, made.sentence = value, sentence
        return made

    POLICY = "policy", "the configured policy serves it first"
    HANDOVER = "handover", "other jobs were suspended to give it their devices"
    PRIORITY = "priority", "its priority is higher"
    STARTED_GUARANTEED = "started_guaranteed", "it is guaranteed and has run before, so its time runs on"
    PROMISED = "promised", "a start was promised to it"
    STARVED = "starved", "it has waited out of proportion to its run time"
    STARVED_LONGER = "starved_longer", "both have waited out of proportion, and it has waited longer"
    INTERACTIVE = "interactive", "a person waits for it"
    TENANT_SHARE = "tenant_share", "its tenant has used less of its share"
    USER_SHARE = "user_share", "its user has used less than others of the tenant lately"
    SERVICE_LEVEL = "service_level", "it is on a lower level of device-hours received"
    SCORE = "score", "it has received less, or progresses more per device-second"
    ARRIVAL = "arrival", "it was submitted earlier"
