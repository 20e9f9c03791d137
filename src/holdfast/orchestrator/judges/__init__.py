"""Asking judges for environments: one desk for a process and its workers, which keeps every reply."""
