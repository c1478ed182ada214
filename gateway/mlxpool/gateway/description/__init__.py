"""Schemas of the gateway's requests and answers, for the OpenAPI document."""
