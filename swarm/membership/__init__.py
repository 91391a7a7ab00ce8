"""SWIM membership with the Lifeguard extensions, sans-IO."""
