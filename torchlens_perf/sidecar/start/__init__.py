"""How the sidecar begins: it waits with next to nothing imported, and imports on idle processors."""
