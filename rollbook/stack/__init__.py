"""The local stack: Temporal, PostgreSQL and S3 from pip wheels, started and watched as children."""
