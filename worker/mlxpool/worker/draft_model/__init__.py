"""The draft model: a smaller model beside the served model proposes next tokens."""
