"""Schemas of what the gateway takes and answers, for the OpenAPI document."""
