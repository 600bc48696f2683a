"""Integrations with other libraries; each is imported by name and needs that library."""
