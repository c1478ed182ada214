"""The draft model: a small model beside the one that is served, which proposes its next tokens."""
