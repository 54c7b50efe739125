"""The sections of a report, one file each: what of a result they show, in which order."""
