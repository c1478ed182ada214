"""The draft model: a smaller model beside the served one proposes next tokens."""
