/* Preloaded: sockets that would listen on every address listen on 127.0.0.1 only, so that another process can have
 * their ports on another address of the loopback interface. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <string.h>

int bind(int socket, const struct sockaddr *address, socklen_t length) {
    int (*really_bind)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "bind");
    struct sockaddr_in6 changed;
    if (address->sa_family == AF_INET && ((const struct sockaddr_in *)address)->sin_addr.s_addr == INADDR_ANY) {
        memcpy(&changed, address, length);
        ((struct sockaddr_in *)&changed)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        return really_bind(socket, (struct sockaddr *)&changed, length);
    }
    if (address->sa_family == AF_INET6 && IN6_IS_ADDR_UNSPECIFIED(&((const struct sockaddr_in6 *)address)->sin6_addr)) {
        memcpy(&changed, address, length);
        inet_pton(AF_INET6, "::ffff:127.0.0.1", &changed.sin6_addr);
        return really_bind(socket, (struct sockaddr *)&changed, length);
    }
    return really_bind(socket, address, length);
}
